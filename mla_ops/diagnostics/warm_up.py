"""Which graphs must have been recorded, by their calls: CUDA graphs run a call eagerly first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

__all__ = ["GraphCall", "recordings_due"]


class GraphCall(NamedTuple):
    """One call of one graph: in which step, and the integers (sizes too) among its arguments."""

    step: int
    compile_id: str
    sizes: tuple[int | None, ...]


def recordings_due(calls: Iterable[GraphCall], capturable: Collection[str]) -> set[str]:
    """Return the graphs with a call that torch records or replays; the others only warmed up.

    The first call with each set of sizes warms up, and so does every later call of that step,
    whatever its graph: a recording never follows a warm-up.

    Args:
        calls: of all graphs, in order.
        capturable: compile ids of the graphs that CUDA graphs were asked for.

    Source: ``CUDAGraphTreeManager._run`` of torch 2.11 to 2.14.
    """
    due: set[str] = set()
    warm: set[tuple[str, tuple[int | None, ...]]] = set()
    warming_step: int | None = None
    for step, compile_id, sizes in calls:
        if compile_id not in capturable:
            continue
        if (compile_id, sizes) not in warm or warming_step == step:
            warm.add((compile_id, sizes))
            warming_step = step
        else:
            due.add(compile_id)
    return due
