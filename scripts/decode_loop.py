"""A serving loop with captured decode steps: the report this project began with, as a program.

DeepSeek-V2-Lite attention decodes requests of random length that arrive and finish. The batch is
padded to the next captured size. Data-parallel ranks agree on that size at each step; a rank
without requests runs a dummy batch of length 0 rows. Sampled steps are compared with float64
attention over the caches. The exit status is 1 after a fault, a stale result, a skipped capture,
or unless each rank has one recording for each size and one replay for each step.

    python scripts/decode_loop.py --steps 2000 --capture reduce-overhead
    python scripts/decode_loop.py --batch-sizes 16 --data-parallel 1 --compare-eager

All ranks share one GPU. Figures are of decode steps alone: prefill, which is eager, and checks
stop the clock on every rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from _loop_capture import CAPTURES
from _loop_plants import PLANTS
from _loop_report import MIN_RATIO, as_text, problems, summary
from _loop_worker import Result, Settings, Worker
from _record import environment

from mla_ops.cli.options import DTYPES
from mla_ops.presets import PRESETS


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        settings = settings_of(options)
    except ValueError as error:
        print(f"decode_loop: {error}", file=sys.stderr)
        return 2
    runs = [settings]
    if options.compare_eager:
        runs.append(dataclasses.replace(settings, capture="none"))
    report: dict[str, Any] = {"environment": environment(), "runs": []}
    failed: list[str] = []
    for run in runs:
        results, crash = serve(run)
        found = [crash] if crash else problems(run, results)
        failed += found
        report["runs"].append(summary(run, results) | {"problems": found})
    if options.compare_eager and not failed:
        compiled, eager = (run["steps_per_second"] for run in report["runs"])
        report["ratio"] = compiled / eager
        if settings.device == "cuda" and report["ratio"] < MIN_RATIO:
            failed.append(f"{settings.capture} is {report['ratio']:.2f}x as fast as eager")
    report["passed"] = not failed
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 1 if failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--capture", choices=CAPTURES, default="reduce-overhead")
    add("--steps", type=int, default=2000 if cuda else 100)
    sizes = [16, 32, 64, 128, 256, 512] if cuda else [2, 4, 8]
    add("--batch-sizes", type=int, nargs="+", default=sizes, help="default: %(default)s")
    add("--data-parallel", type=int, default=2, metavar="N", help="processes; default: 2")
    add("--layers", type=int, default=27 if cuda else 2, help="default: %(default)s")
    add("--preset", choices=("small", *PRESETS), default="deepseek-v2-lite")
    add("--max-seq-len", type=int, default=1024 if cuda else 256, help="default: %(default)s")
    add("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    add("--dtype", choices=DTYPES, help="default: fp32 on the CPU, bf16 elsewhere")
    add("--check-every", type=int, default=50, help="steps between checks; default: 50")
    add("--seed", type=int, default=0)
    add("--compare-eager", action="store_true", help="run eagerly too and print the ratio")
    add("--json", action="store_true", help="print JSON in place of text")
    add("--plant", choices=PLANTS, help="break the loop on purpose: the checks must tell")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """Return what the options ask for; raise a ValueError with one line where they cannot be."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be available, got cuda on a machine without it")
    if options.device == "cpu" and options.capture == "full-graph":
        raise ValueError("capture must be reduce-overhead or none on the CPU, got full-graph")
    if options.compare_eager and options.capture == "none":
        raise ValueError("capture must not be none with --compare-eager: nothing to compare")
    for name in ("steps", "data_parallel", "layers", "check_every"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(options, name)}")
    if min(options.batch_sizes) < 1:
        raise ValueError(f"batch_sizes must be at least 1, got {min(options.batch_sizes)}")
    if options.max_seq_len < 8:
        raise ValueError(f"max_seq_len must be at least 8, got {options.max_seq_len}")
    return Settings(
        capture=options.capture,
        device=options.device,
        preset=options.preset,
        dtype=options.dtype or ("fp32" if options.device == "cpu" else "bf16"),
        layers=options.layers,
        steps=options.steps,
        batch_sizes=tuple(sorted(set(options.batch_sizes))),
        data_parallel=options.data_parallel,
        max_seq_len=options.max_seq_len,
        check_every=options.check_every,
        seed=options.seed,
        plant=options.plant,
    )


def serve(settings: Settings) -> tuple[list[Result], str]:
    """Run every rank to its end; return what they saw, or why one died."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            # A rank that dies takes the others along: they would wait for it.
            mp.spawn(_rank, (settings, folder), settings.data_parallel)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            return [], f"a rank died: {str(error).strip()}"
        files = [Path(folder) / f"rank{rank}" for rank in range(settings.data_parallel)]
        return [pickle.loads(file.read_bytes()) for file in files], ""


def _rank(rank: int, settings: Settings, folder: str) -> None:
    if settings.device == "cpu":
        # Ranks that fight for the cores are slower than ranks that share them.
        torch.set_num_threads(max(torch.get_num_threads() // settings.data_parallel, 1))
    result = Worker(settings, rank, f"{folder}/rendezvous").run()
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
