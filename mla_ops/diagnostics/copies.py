"""Copies of big buffers, in Inductor's post-grad graph and in the code generated from it.

The generated code is the truth: Inductor drops copies that the graph asks for, fuses them into
other kernels, and adds copies of its own to satisfy a layout. The graph is the second witness,
used where there is no code to read (graphs traced for a device this machine lacks, C++ wrappers).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from mla_ops.inductor.nodes import COPYING, Size, operator_name, size_hint, size_of

__all__ = [
    "COPYING",
    "BigCopy",
    "Size",
    "graph_copies",
    "graph_inputs",
    "operator_name",
    "size_of",
    "symbol_hints",
]


class BigCopy(NamedTuple):
    """One copy of a big buffer.

    Attributes:
        bytes: bytes written.
        where: the kernel or node that does it, for a reader.
        buffers: names, in the code or graph, of the buffers read and written.
    """

    bytes: int
    where: str
    buffers: tuple[str, ...] = ()


def graph_inputs(graph: fx.Graph) -> dict[str, Size]:
    """Map the tensors a graph is given to their sizes."""
    sizes = {
        node.name: size_of(node.meta.get("val"))
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
    }
    return {name: size for name, size in sizes.items() if size is not None}


def symbol_hints(graph: fx.Graph) -> dict[str, int]:
    """Map the symbols of a graph's dynamic sizes to the values it was traced with."""
    hints: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                hint = size_hint(size)
                if hint is not None:
                    hints[str(size.node.expr)] = hint
    return hints


def graph_copies(graph: fx.Graph, big_bytes: int) -> list[BigCopy]:
    """List the nodes that copy a buffer of at least ``big_bytes``."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = operator_name(node.target)
        written = _written(node, name)
        if written is None or written.bytes < big_bytes:
            continue
        sources = node.all_input_nodes[1:] if name == "aten.copy_" else node.all_input_nodes
        read = [size_of(source.meta.get("val")) for source in sources]
        if any(size is not None and size.bytes >= big_bytes for size in read):
            names = tuple(source.name for source in node.all_input_nodes)
            found.append(BigCopy(written.bytes, f"{name}({', '.join(names)})", names))
    return found


def _written(node: fx.Node, name: str) -> Size | None:
    """Size what a copying node writes; None for every other node."""
    if name == "aten.copy_":
        target, source = node.args[0], node.args[1]
        # Left behind by the reinplacing pass, and dropped when it is lowered.
        if target is source or not isinstance(target, fx.Node):
            return None
        return size_of(target.meta.get("val"))
    return size_of(node.meta.get("val")) if name in COPYING else None
