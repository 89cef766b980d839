"""How decode_loop.py runs a step: compiled with CUDA graphs, captured by hand, or eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from _loop_model import LoopModel, Tap

from mla_ops.diagnostics import measuring

CAPTURES = ("reduce-overhead", "full-graph", "none")
# Warm-up, recording, first replay.
_UNTIMED_CALLS = 3

Step = Callable[[int], tuple[Tap, ...]]


class Captured(NamedTuple):
    """What a way of capturing did; None where there is no such thing.

    Recordings are those of the whole run, replays those of the steps: warm-up replays too.
    """

    graphs: int | None
    recordings: int | None
    replays: int | None
    skips: int | None
    reasons: tuple[str, ...] = ()


class Stepper(NamedTuple):
    """The step, and what was captured up to now."""

    step: Step
    captured: Callable[[], Captured]


@contextlib.contextmanager
def capturing(capture: str, model: LoopModel, batch_sizes: Sequence[int]) -> Iterator[Stepper]:
    """Make the step and run it at every size, largest first, as engines do; no row is live."""
    with _SETUPS[capture](model, batch_sizes) as stepper:
        step = _without_sync(stepper.step) if model.tokens.is_cuda else stepper.step
        yield Stepper(step, stepper.captured)


@contextlib.contextmanager
def _eager(model: LoopModel, batch_sizes: Sequence[int]) -> Iterator[Stepper]:
    _warm_up(model, batch_sizes)
    yield Stepper(model, lambda: Captured(None, None, None, None))


@contextlib.contextmanager
def _compiled(model: LoopModel, batch_sizes: Sequence[int]) -> Iterator[Stepper]:
    cuda = model.tokens.is_cuda
    with measuring() as recorder:
        # Dynamic from the start: one graph of Inductor, one recording for each size.
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=True)

        def step(batch_size: int) -> tuple[Tap, ...]:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(batch_size)

        _warm_up(step, batch_sizes)
        warm = recorder.result().replays or 0

        def captured() -> Captured:
            seen = recorder.result()
            if not cuda:
                return Captured(seen.graphs, None, None, None)
            replays = None if seen.replays is None else seen.replays - warm
            return Captured(seen.graphs, seen.recordings, replays, seen.skips, seen.reasons)

        yield Stepper(step, captured)


@contextlib.contextmanager
def _by_hand(model: LoopModel, batch_sizes: Sequence[int]) -> Iterator[Stepper]:
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tap, ...]]] = {}
    replays = 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _warm_up(model, batch_sizes)
    torch.cuda.current_stream().wait_stream(side)
    pool = torch.cuda.graph_pool_handle()
    for size in sorted(batch_sizes, reverse=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            taps = model(size)
        graphs[size] = graph, taps

    def step(batch_size: int) -> tuple[Tap, ...]:
        nonlocal replays
        graph, taps = graphs[batch_size]
        graph.replay()
        replays += 1
        return taps

    yield Stepper(step, lambda: Captured(None, len(graphs), replays, 0))


_SETUPS = {"reduce-overhead": _compiled, "full-graph": _by_hand, "none": _eager}


def _warm_up(step: Step, batch_sizes: Sequence[int]) -> None:
    for size in sorted(batch_sizes, reverse=True):
        for _ in range(_UNTIMED_CALLS):
            step(size)


def _without_sync(step: Step) -> Step:
    """Let torch raise where the step waits for the device; everything is warm by now."""

    def checked(batch_size: int) -> tuple[Tap, ...]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(batch_size)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked
