"""``python -m mla_ops bench``: time of a decode by backend, mode, batch and length."""

from __future__ import annotations

import argparse
import datetime
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mla_ops.cli.bench_check import Oracle
from mla_ops.cli.bench_modes import CUDA_MODES, MODES, prepare
from mla_ops.cli.bench_plot import check_plot_path, plot
from mla_ops.cli.bench_report import BenchReport, BenchResult, as_csv, as_table
from mla_ops.cli.bench_step import PAGE_SIZE, DecodeStep, StepShape
from mla_ops.cli.bench_timing import Ceilings, Timing, ceilings, measure_us, poison, pools_needed
from mla_ops.cli.options import DTYPES, available_device, default_device, positive
from mla_ops.diagnostics.environment import environment
from mla_ops.diagnostics.json_text import json_text
from mla_ops.ops._selection import BACKENDS, reasons_against
from mla_ops.presets import PRESETS

__all__ = ["configure", "run"]

SCHEMA = "mla_ops.bench/1"


class Plan(NamedTuple):
    """What is to be measured, checked to be possible here."""

    device: torch.device
    dtype: torch.dtype
    shapes: list[StepShape]
    backends: list[str]
    modes: list[str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    on_cuda = default_device() == "cuda"
    parser.usage = "python -m mla_ops bench [options]"
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        default="deepseek-v2-lite",
        help=f"of {', '.join(PRESETS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--heads", type=positive, help="heads on this rank (default: all of the model)"
    )
    parser.add_argument(
        "--batch",
        type=_positives,
        default="1,8,32" if on_cuda else "1,4",
        help="sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=_positives,
        default="1024,4096,16384" if on_cuda else "256,1024,4096",
        help="cached tokens of each sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--backends",
        type=_among("auto", *BACKENDS),
        help="default: all that run here, on CUDA without the reference",
    )
    parser.add_argument(
        "--modes",
        type=_among(*MODES),
        help=f"of {', '.join(MODES)}; default: all that the device has",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on the CPU, bf16 elsewhere")
    parser.add_argument("--device", default=default_device(), help="default: %(default)s")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, described below")
    form.add_argument("--csv", action="store_true", help="print the results as CSV")
    parser.add_argument("--plot", type=Path, help="write a picture too, such as out.png")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Lists are separated by commas. JSON:\n\n" + "\n\n".join(
        f"{kind.__name__}: {inspect.getdoc(kind)}" for kind in (BenchReport, BenchResult)
    )


def run(options: argparse.Namespace) -> int:
    """Print the times; return 1 if one is refused, 2 if nothing can be measured as asked."""
    try:
        plan = _plan(options)
        if options.plot is not None:
            check_plot_path(options.plot)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    report = _measure(plan, options.preset)
    form = json_text(report) if options.json else None
    print(form or (as_csv(report) if options.csv else as_table(report)))
    if options.plot is not None:
        plot(report, options.plot)
        print(f"bench: wrote {options.plot}", file=sys.stderr)
    return 1 if any(result["refused"] for result in report["results"]) else 0


def _plan(options: argparse.Namespace) -> Plan:
    device = available_device("bench", options.device)
    dtype = DTYPES[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    preset = PRESETS[options.preset]
    shapes = [
        StepShape(
            *(batch, options.heads or preset.num_heads_q, length),
            *(preset.head_dim, preset.kv_lora_rank, preset.softmax_scale),
        )
        for batch in options.batch
        for length in options.length
    ]
    modes = options.modes or [m for m in MODES if device.type == "cuda" or m not in CUDA_MODES]
    for mode in modes:
        if mode in CUDA_MODES and device.type != "cuda":
            raise ValueError(
                f"bench: mode must be eager or compile on {device}, got {mode!r} (CUDA graphs "
                "need a GPU: use --device cuda, or --modes eager,compile)"
            )
    backends = options.backends or _available(shapes, device, dtype)
    for backend in set(backends) - {"auto"}:
        for shape in shapes:
            reasons = reasons_against(backend, shape.decode_shape(device, dtype))
            if reasons:
                raise ValueError(
                    f"bench: backend must run batch {shape.batch_size}, length {shape.length} on "
                    f"{device}, got {backend!r}: {'; '.join(reasons)} "
                    "(leave --backends out to measure what runs here)"
                )
    return Plan(device, dtype, shapes, backends, modes)


def _available(shapes: list[StepShape], device: torch.device, dtype: torch.dtype) -> list[str]:
    """List the backends that run all shapes; on a GPU the reference only if nothing else does."""
    found = [
        name
        for name in BACKENDS
        if not any(reasons_against(name, each.decode_shape(device, dtype)) for each in shapes)
    ]
    return [name for name in found if name != "reference" or device.type == "cpu"] or found


@torch.inference_mode()
def _measure(plan: Plan, preset: str) -> BenchReport:
    torch.manual_seed(0)
    print(f"bench: measuring the ceilings of {plan.device}", file=sys.stderr, flush=True)
    bench = _Bench(plan, ceilings(plan.device, plan.dtype))
    cases = [(s, b, m) for s in plan.shapes for b in plan.backends for m in plan.modes]
    results = [bench.result(*case) for case in _shown(cases)]
    shape = plan.shapes[0]
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "environment": environment(),
        "device": str(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "preset": preset,
        "num_heads_q": shape.num_heads_q,
        "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim_v,
        "page_size": PAGE_SIZE,
        "bandwidth_gb_s": bench.peak.bandwidth_gb_s,
        "matrix_tflop_s": bench.peak.matrix_tflop_s,
        "results": results,
    }


class _Bench:
    """Measures cases; holds the tensors of the last shape and what their decode must give."""

    def __init__(self, plan: Plan, peak: Ceilings) -> None:
        self.plan, self.peak = plan, peak
        self._held: tuple[DecodeStep, Oracle] | None = None

    def result(self, shape: StepShape, backend: str, mode: str) -> BenchResult:
        """Check the outputs of the very run that is timed, then time it."""
        timing, error, refused = self._timed(shape, backend, mode)
        moved, operations = shape.moved_bytes(self.plan.dtype), shape.operations
        us = None if timing is None else timing.us
        return {
            "batch_size": shape.batch_size,
            "length": shape.length,
            "backend": backend,
            "mode": mode,
            "us": us,
            "spread": None if timing is None else timing.spread,
            "roof_us": self.peak.roof_us(moved, operations),
            "gb_s": None if us is None else moved / us * 1e-3,
            "tflop_s": None if us is None else operations / us * 1e-6,
            "relative_error": error,
            "refused": refused,
        }

    def _timed(
        self, shape: StepShape, backend: str, mode: str
    ) -> tuple[Timing | None, float | None, str | None]:
        error = None
        try:
            step, oracle = self._step_of(shape)
            step.backend = backend
            run = prepare(step, mode)
            poison(run())
            results = run()
            error, problem = oracle.verdict(results)
            poison(results)
            del results
            if problem is not None:
                return None, error, f"wrong: {problem}"
            us, spread = measure_us(run, self.plan.device)
        except Exception as failure:
            # Dynamo's and Inductor's have no common base; the reason stands in the table.
            reason = str(failure).strip().split("\n")[0]
            return None, error, f"{type(failure).__name__}: {reason}"
        return Timing(us / len(step.kv), spread), error, None

    def _step_of(self, shape: StepShape) -> tuple[DecodeStep, Oracle]:
        if self._held is None or self._held[0].shape != shape:
            # Freed first: two steps may not fit side by side.
            self._held = None
            device, dtype = self.plan.device, self.plan.dtype
            pools = pools_needed(shape.moved_bytes(dtype))
            step = DecodeStep(shape, num_pools=pools, device=device, dtype=dtype)
            self._held = step, Oracle(step)
        return self._held


Case = tuple[StepShape, str, str]


def _shown(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases under a progress bar; in a log, or without rich, a line for each."""
    try:
        if not sys.stderr.isatty():
            raise ImportError
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for index, case in enumerate(cases, 1):
            print(f"bench: {index}/{len(cases)} {_name(case)}", file=sys.stderr, flush=True)
            yield case
        return
    yield from track(cases, "bench", console=Console(stderr=True), transient=True)


def _name(case: Case) -> str:
    shape, backend, mode = case
    return f"batch {shape.batch_size} length {shape.length} {backend} {mode}"


def _positives(text: str) -> list[int]:
    return list(dict.fromkeys(map(positive, text.split(","))))


def _among(*names: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        unknown: Iterable[str] = [name for name in text.split(",") if name not in names]
        for name in unknown:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, got {name!r}")
        return list(dict.fromkeys(text.split(",")))

    return parse
