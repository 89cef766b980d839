"""The four ways a step of decodes can run, each warm and proven to be what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_ops.cli.bench_step import DecodeStep
from mla_ops.cli.bench_timing import capture
from mla_ops.diagnostics.measure import measuring
from mla_ops.ops.decode import MLAOutput

__all__ = ["CUDA_MODES", "MODES", "NotCapturedError", "prepare"]

MODES = ("eager", "compile", "reduce-overhead", "hand-graph")
CUDA_MODES = ("reduce-overhead", "hand-graph")
# Warm-up, recording, replay.
_CALLS = 3

Run = Callable[[], list[MLAOutput]]


class NotCapturedError(RuntimeError):
    """CUDA graphs were asked for and not used: a time would be that of something else."""


def prepare(step: DecodeStep, mode: str) -> Run:
    """Return the step in one of ``MODES``, compiled, recorded and warm.

    Raises:
        NotCapturedError: ``reduce-overhead`` did not record the step, with what torch said.
    """
    if mode == "eager":
        return step
    if mode == "hand-graph":
        return _hand_graph(step)
    # One code object serves all steps; more than a few compilations of it and torch gives up.
    torch.compiler.reset()
    if mode == "compile":
        compiled: Any = torch.compile(step, fullgraph=True, dynamic=False)
        compiled()
        return compiled  # type: ignore[no-any-return]
    return _reduce_overhead(step)


def _reduce_overhead(step: DecodeStep) -> Run:
    compiled: Any = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def run() -> list[MLAOutput]:
        torch.compiler.cudagraph_mark_step_begin()
        results: list[MLAOutput] = compiled()
        return results

    with measuring() as recorder:
        for _ in range(_CALLS):
            run()
        seen = recorder.result()
    if not seen.captured or seen.replays == 0:
        raise NotCapturedError(
            f"CUDA graphs: {seen.recordings} recordings, {seen.replays} replays, {seen.skips} "
            f"skips; {'; '.join(seen.reasons) or 'torch gives no reason'}"
        )
    return run


def _hand_graph(step: DecodeStep) -> Run:
    with torch.cuda.device(step.q.device):
        graph, kept = capture([step])

    def run() -> list[MLAOutput]:
        graph.replay()
        results: list[MLAOutput] = kept[0]  # type: ignore[assignment]
        return results

    return run
