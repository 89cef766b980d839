"""The environment a benchmark ran in, for the committed results."""

from __future__ import annotations

import datetime

from mla_ops.diagnostics.environment import environment as seen


def environment() -> dict[str, str]:
    """Return GPU, driver, versions and date as text."""
    facts = seen()
    return {
        "date": datetime.date.today().isoformat(),
        "python": facts["python"],
        "torch": facts["torch"],
        "gpu": facts["gpus"][0].split(",")[0] if facts["gpus"] else "none",
        "driver": facts["driver"] or "none",
        # Of "triton 3.6.0": the distribution has other names too.
        "triton": (facts["triton"] or "none").split()[-1],
    }
