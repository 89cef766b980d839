"""Run random programs eager and compiled and print each that differs; exit status 1 if any does.

The programs are those of tests/inductor/programs.py: --seed picks others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from _record import environment
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "inductor"))

from differential import run_program
from programs import programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="programs between progress lines")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    outcomes: Counter[str] = Counter()
    begin = time.monotonic()

    @seed(options.seed)
    @settings(
        max_examples=options.programs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(program) -> None:
        difference = run_program(program)
        outcomes[{None: "equal", "refused": "refused"}.get(difference, "different")] += 1
        if difference not in (None, "refused"):
            print(f"\n{difference}{program}", flush=True)
        if outcomes.total() % options.every == 0:
            report(outcomes, begin)

    run()
    report(outcomes, begin)
    if options.json:
        record = environment() | {
            "seed": options.seed,
            "programs": {name: outcomes[name] for name in ("equal", "refused", "different")},
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(bool(outcomes["different"]))


def report(outcomes: Counter[str], begin: float) -> None:
    counts = ", ".join(f"{outcomes[name]} {name}" for name in ("equal", "refused", "different"))
    seconds = time.monotonic() - begin
    print(
        f"torch {torch.__version__}: {outcomes.total()} programs, {counts}, {seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
