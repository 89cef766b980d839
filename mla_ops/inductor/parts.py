"""Keeping a part of a buffer that is copied to another part of it.

``kv[1:4].copy_(kv[:3].clone())`` after an append is a scatter into the buffer of what is read from
the same buffer. In place, both are one loop: where the parts overlap it reads what it has written.
Seen on torch 2.11, 2.13 and 2.14.1, with aten alone too.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

from torch import Tensor, fx

from mla_ops.inductor.nodes import is_mutation, mutated_bases, operator_name, root_of
from mla_ops.inductor.snapshot import put_snapshot

__all__ = ["keep_moved_parts"]

# Operators whose result is their first argument but for a part; all may be done in place.
_SCATTERS = frozenset(
    (
        *("aten.slice_scatter", "aten.select_scatter", "aten.diagonal_scatter"),
        *("aten.as_strided_scatter", "aten.index_put", "aten._unsafe_index_put"),
        *("aten.index_copy", "aten.index_add", "aten.scatter", "aten.scatter_add"),
        *("aten.scatter_reduce", "aten.masked_scatter"),
    )
)


def keep_moved_parts(graph: fx.Graph) -> None:
    """Put ``mla_ops::snapshot`` behind what is scattered into a buffer and was read from it.

    Args:
        graph: the functional graph, before Inductor reinplaces; changed in place. Only buffers
            that operators of ours mutate are looked at.
    """
    written = {
        _memory(base) for node in graph.nodes if is_mutation(node) for base in mutated_bases(node)
    }
    kept: dict[fx.Node, fx.Node] = {}

    def keep(memory: fx.Node, value: fx.Node) -> fx.Node:
        # A size is a number, whatever it is the size of.
        if not isinstance(value.meta.get("val"), Tensor) or not _reads(value, memory):
            return value
        if value not in kept:
            kept[value] = put_snapshot(value, value)
        return kept[value]

    for node in list(graph.nodes):
        if _is_scatter(node) and (memory := _memory(node)) in written:
            rest: Any = fx.map_arg(node.args[1:], partial(keep, memory))
            node.args = (node.args[0], *rest)


def _is_scatter(node: fx.Node) -> bool:
    return node.op == "call_function" and operator_name(node.target) in _SCATTERS


def _memory(node: fx.Node) -> fx.Node:
    """Follow views, scatters and our mutations to the node whose memory they may be in."""
    while True:
        node = root_of(node)
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node) and is_mutation(source):
            # The results of the call itself come first; operators that mutate return none.
            index: Any = node.args[1]
            node = mutated_bases(source)[index - 1]
        elif _is_scatter(node):
            node = source
        else:
            return node


def _reads(value: fx.Node, memory: fx.Node) -> bool:
    """Tell whether ``value`` may be computed of ``memory`` in the loop that uses it."""
    seen, left = set(), [value]
    while left:
        node = left.pop()
        if node in seen or not isinstance(node.meta.get("val"), Tensor):
            continue
        seen.add(node)
        if _memory(node) is memory:
            return True
        if getattr(node.target, "namespace", None) != "mla_ops":
            left += node.all_input_nodes
    return False
