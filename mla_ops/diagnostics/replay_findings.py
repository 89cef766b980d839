"""Findings about steps: CUDA graphs skipped or recorded again, addresses, outputs kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

from mla_ops._torch_graphs import OVERWRITTEN, dropping_settings
from mla_ops.diagnostics.address_findings import address_findings
from mla_ops.diagnostics.finding import Finding
from mla_ops.diagnostics.holders import held_tensors
from mla_ops.diagnostics.lines import user_line
from mla_ops.diagnostics.measure import CompiledGraph
from mla_ops.diagnostics.measurement import Measurement
from mla_ops.diagnostics.watch import FedBack, GraphOutput, WatchedGraph, WatchedInput, Watcher

__all__ = ["expected_recordings", "kept_findings", "overwritten_finding", "replay_findings"]

_COPY_OUT = (
    "copy it into a buffer of fixed address in the step (register_buffer once, then "
    "{0}.copy_(value)), or clone it outside the compiled function"
)
# How Dynamo names the size of an input: x.size()[0].
_SIZE = ".size()["
_DEBUG = "run with TORCH_LOGS=+cudagraphs and look for the reason"
# What a skip is about -> what mends it. Mutated inputs are findings of their own.
_SKIPS = (
    ("cpu device", "move the tensor of this line to the GPU"),
    ("multiple devices", "keep the compiled function on one device"),
    ("incompatible op", "call that operator outside the compiled step"),
    ("re-recording limit", "keep addresses and sizes the same from step to step"),
    ("caching allocator", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
    (
        "cudagraph_skip_dynamic_graphs",
        "torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = False before the first "
        "step; or pad to a few fixed sizes",
    ),
    ("symbolic shapes", "pad to a few fixed sizes"),
    ("dynamic shape", "pad to a few fixed sizes"),
    ("cpp-wrapper", "torch._inductor.config.cpp_wrapper = False before the first step"),
    ("control flow operator", "compute both branches and choose with torch.where"),
    ("boolean indexing", "choose with torch.where(mask, value, x) in place of x[mask] = value"),
    ("non-Tensor inputs", "pass tensors only: torch.tensor(value) on the model's device"),
    ("input storage mutation", "write the tensor with copy_ in place of set_"),
    ("bisector", "end the bisection: python -m torch._inductor.compiler_bisector end"),
    ("override_cudagraphs", "remove the annotation override_cudagraphs"),
)


def replay_findings(
    measured: Measurement,
    compiled: list[CompiledGraph],
    watcher: Watcher,
    fn: Callable[..., Any],
    *,
    explained: bool,
) -> Iterator[Finding]:
    """Explain what happened from step to step.

    Args:
        measured: what the recorder saw.
        compiled: the graphs Inductor compiled.
        watcher: the calls of the graphs.
        fn: what was compiled: it holds the tensors that stayed.
        explained: whether other findings tell why the number of recordings is unexpected.
    """
    asked = {graph.compile_id for graph in compiled if graph.wants_cudagraphs}
    watched = [graph for name, graph in watcher.graphs.items() if name in asked]
    moving = {each.input.name for each in watcher.fed_back}
    unsteady = [
        finding
        for graph in watched
        for finding in (*address_findings(graph, moving, fn), *_passing_sizes(graph))
    ]
    yield from unsteady
    yield from map(_fed_back, watcher.fed_back if asked else ())
    for reason in measured.reasons:
        if "mutated inputs" not in reason:
            yield _skip(reason)
    if not (explained or unsteady or moving):
        capturable = [graph for graph in compiled if graph.wants_cudagraphs and graph.on_cuda]
        yield from _recorded(measured, capturable, watcher)


def expected_recordings(capturable: list[CompiledGraph], watcher: Watcher) -> tuple[int, int]:
    """Count the recordings the calls ask for.

    The first step with each set of sizes warms up, the second records.

    Returns:
        at least: one for each graph and set of sizes; at most: one for each of their pieces, at
        each place that a step calls it.
    """
    least = pieces = 0
    for graph in capturable:
        watched = watcher.graphs.get(graph.compile_id)
        in_step = Counter((call.step, call.sizes) for call in watched.calls) if watched else {}
        counts: dict[Hashable, list[int]] = {}
        for (_, sizes), count in in_step.items():
            counts.setdefault(sizes, []).append(count)
        # Layers that share the graph: each of its places in a step has a recording.
        again = [sorted(each)[-2] for each in counts.values() if len(each) > 1]
        least += len(again)
        pieces += sum(again) * max(1, graph.facts.partitions if graph.facts else 1)
    return least, pieces


def kept_findings(
    outputs: list[GraphOutput], fn: Callable[..., Any], fed_back: list[FedBack]
) -> Iterator[Finding]:
    """Report outputs that are still held; those that were read again are told as such."""
    read = {each.output.where for each in fed_back}
    held = held_tensors(fn) if outputs else {}
    for output in outputs:
        name = held.get(output.storage_id)
        is_held = name is not None or not output.is_cuda
        if is_held and output.where not in read:
            yield Finding(
                "kept_output",
                f"{name or 'something'} keeps an output of the step after it",
                _COPY_OUT.format(name or "self.kept"),
                output.where,
                name,
            )


def overwritten_finding(error: BaseException) -> Finding | None:
    """Explain the error torch raises when an overwritten output is read; None for others."""
    text = str(error)
    if OVERWRITTEN not in text:
        return None
    return Finding(
        "overwritten_output",
        "an output of an earlier step was read after a replay had overwritten it",
        _COPY_OUT.format("self.kept"),
        user_line(text),
    )


def _fed_back(seen: FedBack) -> Finding:
    name = seen.input.name
    return Finding(
        "overwritten_output",
        f"{name} is an output of an earlier step, which this step overwrites",
        _COPY_OUT.format(name),
        seen.output.where or seen.input.where,
        name,
    )


def _passing_sizes(graph: WatchedGraph) -> Iterator[Finding]:
    """Report sizes that make torch record a graph again."""
    if _is_passing([call.sizes for call in graph.calls]):
        sizes = _sizes_by_name(graph)
        # Where each alone comes back, it is their combinations that do not.
        alone = {name: seen for name, seen in sizes.items() if _is_passing(seen)}
        for name, seen in (alone or sizes).items():
            yield _size_finding(graph.inputs, name, seen)


def _sizes_by_name(graph: WatchedGraph) -> dict[str, list[tuple[int | None, ...]]]:
    """Collect, call by call, the changing sizes of each tensor and the value of each integer."""
    columns: dict[str, list[int]] = {}
    for position, each in enumerate(graph.inputs):
        if len({call.sizes[position] for call in graph.calls}) > 1:
            columns.setdefault(each.name.partition(_SIZE)[0], []).append(position)
    return {
        name: [tuple(call.sizes[position] for position in positions) for call in graph.calls]
        for name, positions in columns.items()
    }


def _is_passing(values: Sequence[Hashable]) -> bool:
    """Tell values that go by from those that come back after others: recorded once, replayed.

    One value that did not come back may still.
    """
    runs = Counter(value for value, _ in groupby(values))
    return sum(count == 1 for count in runs.values()) > 1 and 2 * len(runs) > len(values)


def _size_finding(
    inputs: tuple[WatchedInput, ...], name: str, seen: list[tuple[int | None, ...]]
) -> Finding:
    """Blame the tensor whose sizes change, or the integer itself."""
    values = list(dict.fromkeys(seen))
    shown = ", ".join("x".join(map(str, value)) for value in values)
    is_size = any(each.name.startswith(f"{name}{_SIZE}") for each in inputs)
    fix = (
        f"pad {name} to one of a few sizes, so that sizes come back"
        if is_size
        else f"make {name} a tensor: torch.tensor({name}) on the model's device, written in place"
    )
    return Finding(
        "rerecorded",
        f"{len(values)} {'sizes' if is_size else 'values'} of {name} in {len(seen)} calls "
        f"({shown}): a CUDA graph for each",
        fix,
        # The size itself has a line only where the code does arithmetic with it.
        next((each.where for each in inputs if each.name == name and each.where), None)
        or next((each.where for each in inputs if each.where), None),
        name,
        count=len(values) - 1,
    )


def _skip(reason: str) -> Finding:
    text = reason.strip().split("\n")[0]
    fix = next((fix for words, fix in _SKIPS if words in reason), _DEBUG)
    operator = re.search(r"incompatible op (\S+)", reason)
    return Finding(
        "cudagraph_skip", text, fix, user_line(reason), operator=operator[1] if operator else None
    )


def _recorded(
    measured: Measurement, capturable: list[CompiledGraph], watcher: Watcher
) -> Iterator[Finding]:
    """Compare the recordings with what the calls ask for."""
    recordings = measured.recordings
    least, pieces = expected_recordings(capturable, watcher)
    if recordings is None or measured.skips or not least:
        return
    inputs = (
        each
        for graph in capturable
        if graph.compile_id in watcher.graphs
        for each in watcher.graphs[graph.compile_id].inputs
    )
    where = next((each.where for each in inputs if each.where), None)
    if recordings < least:
        yield Finding(
            "cudagraph_silent",
            f"{recordings} CUDA graphs of at least {least} were recorded, and torch said nothing",
            _silent_fix(capturable, watcher),
            where,
        )
    elif recordings > pieces and not measured.recompiles:
        yield Finding(
            "rerecorded",
            f"{recordings} CUDA graphs for {pieces} pieces of graphs",
            _DEBUG,
            where,
            count=recordings - pieces,
        )


def _silent_fix(capturable: list[CompiledGraph], watcher: Watcher) -> str:
    """Name the settings that drop CUDA graphs, and the tensors whose sizes make one matter."""
    names = (each.compile_id for each in capturable)
    sized = {
        each.name.partition(_SIZE)[0]: None
        for graph in (watcher.graphs[name] for name in names if name in watcher.graphs)
        for position, each in enumerate(graph.inputs)
        if any(call.sizes[position] is not None for call in graph.calls)
    }
    settings = dropping_settings(dynamic=bool(sized))
    if not settings:
        return _DEBUG
    text = " and ".join(f"{name} = {kept}" for name, kept in settings.items())
    fixed = f"; or give {', '.join(sized)} fixed sizes" if "skip_dynamic" in text else ""
    return f"{text} before the first step{fixed}"
