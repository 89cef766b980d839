"""Timing that benchmarks share: CUDA events or a wall clock, and the ceilings of a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import benchmark

__all__ = [
    "Ceilings",
    "Timing",
    "capture",
    "ceilings",
    "compare_us",
    "measure_us",
    "poison",
    "pools_needed",
    "replay_us",
]

# An H200 has 60 MB of L2: the pools a step walks through must be larger together.
L2_BYTES = 60 * 2**20
# Of all pools together: an H200 has 150, and its graphs and outputs need some too.
MOST_BYTES = 60 * 10**9
# Wall-clock seconds of a measurement: more where it is restless, until its quartiles are close.
MIN_SECONDS, MAX_SECONDS = 0.2, 2.0
_CLOSE = 0.1
_Check = Callable[[Sequence[Any]], None]
_WARM_UP_CALLS = 3


class Timing(NamedTuple):
    """Median time of a call in us, and the distance of its quartiles in parts of the median."""

    us: float
    spread: float


class Ceilings(NamedTuple):
    """What this device reached when it was measured."""

    bandwidth_gb_s: float
    matrix_tflop_s: float

    def roof_us(self, moved_bytes: int, operations: int) -> float:
        """Return the least time that moving and computing so much can take."""
        return max(
            moved_bytes / self.bandwidth_gb_s * 1e-3, operations / self.matrix_tflop_s * 1e-6
        )


def pools_needed(bytes_per_pool: int, most: int = 64) -> int:
    """Return how many distinct pools one step must rotate through to find L2 cold."""
    size = max(bytes_per_pool, 1)
    pools = max(2, min(most, -(-3 * L2_BYTES // size)))
    # One pool that large has left L2 before it is read again.
    return max(1, min(pools, MOST_BYTES // size))


def capture(
    launches: Sequence[Callable[[], object]],
) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """Capture the calls into one CUDA graph, warm; keep what they returned as long as it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [launch() for launch in launches]
    return graph, kept


def poison(results: Iterable[Iterable[Tensor]]) -> None:
    """Fill results with NaN before they are computed again.

    A run that leaves a part of them out may be given memory that still holds an earlier, right
    result: of the warm-up, or of another backend.
    """
    for result in results:
        for tensor in result:
            tensor.fill_(torch.nan)


def replay_us(
    launches: Sequence[Callable[[], object]], repeats: int = 20, check: _Check | None = None
) -> float:
    """Capture ``launches`` into one CUDA graph and return the median time of one of them in us.

    Args:
        launches: the calls.
        repeats: replays that are timed.
        check: called with the tuple of tensors each call returned, as a replay of the graph left
            it in memory full of NaN; what it raises is raised before anything is timed.
    """
    return compare_us([launches], repeats, [check])[0]


def compare_us(
    sides: Sequence[Sequence[Callable[[], object]]],
    repeats: int = 20,
    checks: Sequence[_Check | None] | None = None,
) -> tuple[float, ...]:
    """Return the median us of a launch of each side, and check each, as ``replay_us`` does.

    Replays alternate: a GPU that draws all the power it may lowers its clocks, and whoever were
    timed last would seem slower.
    """
    captured = [capture(launches) for launches in sides]
    for (graph, kept), check in zip(captured, checks or [None] * len(sides), strict=True):
        if check is not None:
            results: Any = kept
            poison(results)
            graph.replay()
            check(results)
    return _alternate(captured, repeats)


def _alternate(
    captured: Sequence[tuple[torch.cuda.CUDAGraph, list[object]]], repeats: int
) -> tuple[float, ...]:
    times: list[list[float]] = [[] for _ in captured]
    for turn in range(_WARM_UP_CALLS + repeats):
        for place in range(len(captured)):
            # Clocks lag: nobody always follows the same neighbour.
            side = (turn + place * (-1) ** turn) % len(captured)
            us = _event_us(captured[side][0].replay)
            if turn >= _WARM_UP_CALLS:
                times[side].append(us)
    return tuple(
        statistics.median(found) / len(kept)
        for found, (_, kept) in zip(times, captured, strict=True)
    )


def measure_us(run: Callable[[], object], device: torch.device) -> Timing:
    """Measure the time of ``run``: by events on CUDA, else by a wall clock."""
    if device.type == "cuda":
        return _events(run, 20)
    timer = benchmark.Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    seen = timer.adaptive_autorange(_CLOSE, min_run_time=MIN_SECONDS, max_run_time=MAX_SECONDS)
    return Timing(seen.median * 1e6, seen.iqr / seen.median)


def _events(run: Callable[[], object], repeats: int) -> Timing:
    for _ in range(_WARM_UP_CALLS):
        run()
    times = [_event_us(run) for _ in range(repeats)]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(middle, (high - low) / middle)


def _event_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def ceilings(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Measure the bandwidth of reading and writing memory, and the matrix rate in ``dtype``."""
    return _cuda_ceilings(device, dtype) if device.type == "cuda" else _cpu_ceilings(dtype)


def _cuda_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    source = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # Not copy_: a graph runs that as a copy-engine node, slower than kernels read memory.
    copy = replay_us([lambda: torch.neg(source, out=target)] * 4)
    a, b = (torch.randn((8192, 8192), device=device, dtype=dtype) for _ in range(2))
    product = replay_us([lambda: a @ b] * 4)
    return Ceilings(2 * 2**31 / copy * 1e-3, 2 * 8192**3 / product * 1e-6)


def _cpu_ceilings(dtype: torch.dtype) -> Ceilings:
    cpu = torch.device("cpu")
    source = torch.randn(2**26)
    target = torch.empty_like(source)
    # A write costs the bus a read too: reading alone, as decode does, is often faster.
    copied = 2 * source.nbytes / measure_us(lambda: torch.neg(source, out=target), cpu).us
    read = source.nbytes / measure_us(source.sum, cpu).us
    # Backends may widen: the faster of the dtype's and float32's products is the ceiling.
    rate = max(_cpu_matrix_rate(each) for each in {dtype, torch.float32})
    return Ceilings(max(copied, read) * 1e-3, rate * 1e-6)


def _cpu_matrix_rate(dtype: torch.dtype) -> float:
    a, b = (torch.randn((1024, 1024)).to(dtype) for _ in range(2))
    return 2 * 1024**3 / measure_us(lambda: a @ b, torch.device("cpu")).us
