"""The environment a benchmark ran in, for the committed results."""

from __future__ import annotations

import datetime
import platform
import subprocess

import torch


def environment() -> dict[str, str]:
    """Return GPU, driver, versions and date as text."""
    record = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": "none",
        "driver": "none",
    }
    try:
        import triton

        record["triton"] = triton.__version__
    except ImportError:
        record["triton"] = "none"
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        record["driver"] = answer.stdout.strip() or "unknown"
    return record
