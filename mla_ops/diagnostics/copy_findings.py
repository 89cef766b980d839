"""Findings about copies of big buffers: which line asks for them, and what does without."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import fx

from mla_ops.diagnostics.copies import COPYING, BigCopy, operator_name, size_of
from mla_ops.diagnostics.finding import Finding
from mla_ops.diagnostics.graph_findings import named_inputs
from mla_ops.diagnostics.lines import user_line
from mla_ops.diagnostics.measure import CompiledGraph
from mla_ops.diagnostics.walk import ancestors, is_view, line_of, mutates, root_of
from mla_ops.diagnostics.watch import WatchedGraph

__all__ = ["copy_findings"]

_CONVERTS = ("aten._to_copy", "prims.convert_element_type")
_WRITES_PART = re.compile(r"index_put|index_copy|scatter|index_fill|index_add")


def copy_findings(
    graph: CompiledGraph, watched: WatchedGraph | None, big_bytes: int
) -> Iterator[Finding]:
    """Explain the copies of one graph; several kernels of one line are one finding."""
    if graph.graph is None:
        return
    names = named_inputs(graph, watched)
    for copy in graph.big_copies or ():
        buffer = _buffer(graph.graph, copy)
        node = _asked_by(graph.graph, copy, buffer, big_bytes)
        if _computes(graph.graph, node, buffer):
            continue
        user = names.get(buffer.name) if buffer is not None else None
        kind, fix = _kind(graph.graph, node, buffer)
        operator = operator_name(node.target) if node is not None else copy.where.split("(")[0]
        name = user.name if user else None
        yield Finding(
            kind,
            f"{name or 'a buffer'} is copied by {operator}",
            fix.format(name=name or "the buffer"),
            line_of(node) if node is not None else user.where if user else None,
            name,
            operator,
            copy.bytes,
        )


def _buffer(graph: fx.Graph, copy: BigCopy) -> fx.Node | None:
    """Choose the input of the graph among the buffers of a copy, else any node that is one."""
    nodes: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
    found = [nodes[name] for name in copy.buffers if name in nodes]
    inputs = [node for node in found if node.op == "placeholder"]
    return next(iter(inputs or found), None)


def _asked_by(
    graph: fx.Graph, copy: BigCopy, buffer: fx.Node | None, big_bytes: int
) -> fx.Node | None:
    """Find the node a copy is made for: of the kernel's operators, big, and made of the buffer."""
    kernel = copy.where.split("(")[0]
    found: list[fx.Node] = []
    for node in graph.nodes:
        size = size_of(node.meta.get("val"))
        if node.op != "call_function" or is_view(node) or size is None or size.bytes < big_bytes:
            continue
        if not any(base in kernel for base in _bases(node)):
            continue
        if buffer is None or any(each is buffer for each in ancestors(node)):
            found.append(node)
    traced = [node for node in found if user_line(node.meta.get("stack_trace"))]
    if traced:
        # What computes on the buffer asks for the copy, not a later reader of the result.
        writes = (node for node in traced if _WRITES_PART.search(operator_name(node.target)))
        return next(writes, traced[0])
    writers: list[fx.Node] = [
        node for node in graph.nodes if buffer is not None and mutates(node, buffer)
    ]
    return next(iter([*found, *writers]), None)


def _bases(node: fx.Node) -> set[str]:
    """Name a node as kernels do: by its operator and the one it was decomposed from."""
    names = (operator_name(node.target), operator_name(node.meta.get("original_aten", "-")))
    return {name.rpartition(".")[2].rstrip("_") for name in names}


def _computes(graph: fx.Graph, node: fx.Node | None, buffer: fx.Node | None) -> bool:
    """Tell whether what looks like a copy is an operator's own result: relu(x) of a big x."""
    if node is None or _is_written_later(graph, node, buffer):
        return False
    return operator_name(node.target) not in COPYING


def _is_written_later(graph: fx.Graph, node: fx.Node | None, buffer: fx.Node | None) -> bool:
    """Tell whether ``node`` or one after it writes the buffer, whose older value then matters."""
    nodes = list(graph.nodes)
    later = nodes if node is None else nodes[nodes.index(node) :]
    return buffer is not None and any(mutates(each, root_of(buffer)) for each in later)


def _kind(graph: fx.Graph, node: fx.Node | None, buffer: fx.Node | None) -> tuple[str, str]:
    name = "" if node is None else operator_name(node.target)
    if name in _CONVERTS and node is not None:
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, torch.Tensor) else "the dtype it is read in"
        return "dtype_copy", f"keep {{name}} in {dtype}: convert it once, before the first step"
    if _WRITES_PART.search(name):
        return "cache_copy", (
            "write {name} with an operator that works in place (mla_ops.append_kv_), and give "
            "each layer a tensor of its own"
        )
    if _is_written_later(graph, node, buffer):
        return "big_copy", (
            "{name} is written while an older value of it is still needed: read what you need "
            "(a few rows) before the write, and do not use or return the older value after it"
        )
    return "big_copy", (
        "keep {name} in the layout its readers want (contiguous, transposed once before the "
        "first step), and drop .clone() and .contiguous()"
    )
