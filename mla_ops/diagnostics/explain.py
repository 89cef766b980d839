"""Why did my model fall off CUDA graphs? Compile it, run steps, name each cause and its fix."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mla_ops._torch_breaks import unsupported
from mla_ops._torch_graphs import asks_for_cudagraphs, uncompiled
from mla_ops.diagnostics.compile_findings import compile_findings, untraced_findings
from mla_ops.diagnostics.copy_findings import copy_findings
from mla_ops.diagnostics.finding import KINDS, Finding, merged
from mla_ops.diagnostics.graph_findings import graph_findings
from mla_ops.diagnostics.lines import argument_names
from mla_ops.diagnostics.measure import BIG_BYTES, Recorder, measuring
from mla_ops.diagnostics.measurement import Measurement
from mla_ops.diagnostics.replay_findings import (
    expected_recordings,
    kept_findings,
    overwritten_finding,
    replay_findings,
)
from mla_ops.diagnostics.report import Facts, Report
from mla_ops.diagnostics.watch import GraphOutput, Watcher

__all__ = ["explain", "explain_calls"]


def explain(
    fn: Callable[..., Any],
    *args: Any,
    steps: int = 3,
    mode: str | None = "reduce-overhead",
    strict: bool = False,
    inputs: Callable[[int], Sequence[Any]] | None = None,
    big_bytes: int = BIG_BYTES,
    **kwargs: Any,
) -> Report:
    """Compile ``fn``, run it ``steps`` times, and tell what keeps it from running at full speed.

    It runs on any device. Without a GPU there are no CUDA graphs to count, but whatever would
    keep the code out of them and shows in the compiled graph or in the arguments is reported:
    compile for the CPU what you will run on a GPU. Inference belongs under ``torch.no_grad()``.

    Args:
        fn: function or module; what ``torch.compile`` returned is compiled anew.
        *args: its arguments, the same objects at every step.
        steps: calls; CUDA graphs need 3 (warm-up, recording, replay).
        mode: of ``torch.compile``; CUDA graphs matter where it asks for them.
        strict: raise if anything is found.
        inputs: makes the positional arguments of each step from its number, in place of ``args``.
        big_bytes: from how many bytes on the copy of a buffer is reported.
        **kwargs: keyword arguments of ``fn``.

    Returns:
        Report: prints as a table; ``.ok`` is True when nothing was found.

    Raises:
        TypeError: both ``args`` and ``inputs`` were given, or ``inputs`` made no tuple or list.
        ValueError: ``steps`` is below 1.
        RuntimeError: ``strict``, and something was found.
        Exception: what a step raised, if nothing was found that may be its cause.
    """
    if args and inputs is not None:
        raise TypeError("explain: args must be empty with inputs=, got both (give one of them)")
    given = inputs or (lambda step: args)
    report = explain_calls(fn, given, kwargs, steps=steps, mode=mode, big_bytes=big_bytes)
    if strict:
        report.raise_if_failed()
    return report


def explain_calls(
    fn: Callable[..., Any],
    inputs: Callable[[int], Sequence[Any]],
    kwargs: Mapping[str, Any],
    *,
    steps: int,
    mode: str | None,
    big_bytes: int = BIG_BYTES,
) -> Report:
    """Do what ``explain`` does, for keyword arguments of any name.

    Args:
        fn: as there.
        inputs: makes the positional arguments of a step from its number.
        kwargs: keyword arguments of every step.
        steps: as there.
        mode: as there.
        big_bytes: as there.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"explain: steps must be at least 1, got {steps}")
    fn = uncompiled(fn)
    names = argument_names(fn)
    watcher, known = Watcher(mode, names), unsupported()
    with measuring(big_bytes) as recorder:
        error, kept = _run(torch.compile(fn, backend=watcher), watcher, steps, inputs, kwargs)
        overwritten = overwritten_finding(error) if error else None
        measured = recorder.result()
    cudagraphs = asks_for_cudagraphs(mode)
    held = list(kept_findings(kept, fn, watcher.fed_back)) if cudagraphs else []
    if overwritten is not None and not watcher.fed_back:
        held.append(overwritten)
    found = [
        *compile_findings(measured, watcher.graphs.values(), names, cudagraphs=cudagraphs),
        *_graphs(recorder, watcher, big_bytes),
        *replay_findings(measured, recorder.graphs, watcher, fn, explained=bool(held)),
        *held,
    ]
    if error is None:
        found += untraced_findings(measured, unsupported() - known)
    elif overwritten is None:
        if not found:
            raise error
        found.append(_failed(error))
    findings = sorted(merged(found), key=lambda finding: list(KINDS).index(finding.kind))
    return Report(_facts(measured, recorder, watcher, steps), tuple(findings))


def _run(
    compiled: Callable[..., Any],
    watcher: Watcher,
    steps: int,
    inputs: Callable[[int], Sequence[Any]],
    kwargs: Mapping[str, Any],
) -> tuple[Exception | None, list[GraphOutput]]:
    """Run the steps.

    Returns:
        what ended the run early, and the outputs still held after it.
    """
    kept: list[GraphOutput] = []
    for step in range(steps):
        watcher.step = step
        args = inputs(step)
        if not isinstance(args, tuple | list):
            # A bare tensor would be taken apart into its rows.
            raise TypeError(
                f"explain: inputs must return a tuple of the arguments, got {type(args).__name__} "
                "(return (x,))"
            )
        torch.compiler.cudagraph_mark_step_begin()
        try:
            compiled(*args, **kwargs)
        except Exception as error:
            # Told after the causes that were found; raised again if there are none.
            return error, []
        kept = _kept(watcher)
    return None, kept


def _failed(error: Exception) -> Finding:
    text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
    return Finding(
        "step_failed",
        f"a step ended with {text}",
        "mend the other causes; if it stays, call the compiled function to see its traceback",
    )


def _kept(watcher: Watcher) -> list[GraphOutput]:
    if not watcher.kept():
        return []
    # In cycles that nothing holds any more.
    gc.collect()
    return watcher.kept()


def _graphs(recorder: Recorder, watcher: Watcher, big_bytes: int) -> list[Finding]:
    return [
        finding
        for graph in recorder.latest()
        for explained in (graph_findings, copy_findings)
        for finding in explained(graph, watcher.graphs.get(graph.compile_id), big_bytes)
    ]


def _facts(measured: Measurement, recorder: Recorder, watcher: Watcher, steps: int) -> Facts:
    capturable = [graph for graph in recorder.graphs if graph.wants_cudagraphs and graph.on_cuda]
    partitions = sum(graph.facts.partitions for graph in capturable if graph.facts)
    metadata = None
    if measured.launches is not None:
        metadata = sum(
            count
            for name, count in measured.launches.items()
            if name.startswith("mla_ops.mla_metadata")
        )
    recorded = measured.recordings
    _, expected = expected_recordings(capturable, watcher)
    extra = None if recorded is None else max(0, recorded - expected)
    return {
        "steps": steps,
        "graphs": measured.graphs,
        "graph_breaks": None if measured.breaks is None else len(measured.breaks),
        "recompiles": None if measured.recompiles is None else len(measured.recompiles),
        "cudagraphs_asked": measured.capturable,
        "cudagraphs_recorded": recorded,
        "cudagraphs_replayed": measured.replays,
        "cudagraphs_rerecorded": extra,
        "cudagraphs_skipped": measured.skips,
        "partitions": partitions,
        "metadata_launches": metadata,
        "kernels": measured.kernels,
        "bytes_copied": None
        if measured.clones is None
        else sum(copy.bytes for copy in measured.clones),
    }
