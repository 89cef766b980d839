"""Timing shared by the benchmarks: CUDA-graph replay over more KV than the L2 cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

# An H200 has 60 MB of L2: the pools a graph walks through must be larger together.
L2_BYTES = 60 * 2**20


def pools_needed(bytes_per_pool: int, most: int = 64) -> int:
    """Return how many distinct pools one graph must rotate through to find L2 cold."""
    return max(2, min(most, -(-3 * L2_BYTES // max(bytes_per_pool, 1))))


def replay_us(launches: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Capture ``launches`` into one CUDA graph and return the median time of one of them in us."""
    return compare_us([launches], repeats)[0]


def compare_us(
    sides: Sequence[Sequence[Callable[[], object]]], repeats: int = 20
) -> tuple[float, ...]:
    """Return the median us of a launch of each side; replays alternate, so clocks meet all."""
    graphs, kept = [], []
    for launches in sides:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches[:2]:
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            kept.append([launch() for launch in launches])
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(3 + repeats):
        for graph, launches, found in zip(graphs, sides, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                found.append(start.elapsed_time(end) * 1e3 / len(launches))
    del kept
    return tuple(statistics.median(found) for found in times)
