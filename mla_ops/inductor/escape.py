"""Keeping a value that leaves the graph from lying in memory that is written after it.

After ``append_kv_(kv, ...)`` the new value of kv is, once reinplaced, kv's own memory. What leaves
the graph with that value must be a copy when the program made one: ``older = kv.clone()`` before
the next append, or ``other.copy_(kv)``. Inductor drops the clone and then returns kv itself, or
runs the ``copy_`` after kv was written again; its reinplacing pass looks at the uses of the buffer
before the end of the graph, not at those that end it. Seen on torch 2.11, 2.13 and 2.14.1.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from mla_ops._torch import storage_id
from mla_ops.inductor.nodes import is_mutation, is_view, mutated_bases, root_of
from mla_ops.inductor.snapshot import put_snapshot, snapshot_op

__all__ = ["keep_escaping_values", "note_fresh_outputs"]

_FRESH = "mla_ops_fresh_outputs"
_COPY = torch.ops.aten.copy_.default


def note_fresh_outputs(graph: fx.Graph) -> None:
    """Note on the output node which outputs are memory of their own.

    Run before Inductor drops copies: later a dropped clone looks like a returned view of an
    input, which torch makes anew from that input and which needs no copy.
    """
    inputs = {
        _storage(node) for node in graph.nodes if node.op == "placeholder" or _is_written(node)
    }
    output = _output(graph)
    if output is not None:
        values = _outputs(output)
        output.meta[_FRESH] = [_storage(value) not in inputs for value in values]


def keep_escaping_values(graph: fx.Graph) -> None:
    """Put ``mla_ops::snapshot`` where a value written by an operator of ours leaves the graph.

    Args:
        graph: the functional graph, after Inductor dropped copies and before it reinplaces;
            changed in place.
    """
    final = {node.args[0]: node.args[1] for node in graph.nodes if node.target is _COPY}
    kept: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is snapshot_op:
            _take_early(node)
        elif node.target is _COPY and _is_overwritten(node.args[1], node.args[0], final):
            node.args = (node.args[0], _kept(node.args[1], kept), *node.args[2:])
    output = _output(graph)
    if output is None:
        return
    values = _outputs(output)
    fresh = output.meta.get(_FRESH, [True] * len(values))
    for index, value in enumerate(values):
        if fresh[index] and _is_alias(value, final):
            values[index] = _kept(value, kept)
    output.args = (tuple(values),)


def _take_early(snapshot: fx.Node) -> None:
    """Move a snapshot to the value it is of.

    Inductor moves nodes to their first use: behind the next mutation, which then could not be in
    place, for an older value would be alive.
    """
    source = snapshot.args[0]
    while isinstance(source, fx.Node) and source.op == "placeholder":
        if source.next.op != "placeholder":
            break
        source = source.next
    if isinstance(source, fx.Node):
        source.append(snapshot)


def _output(graph: fx.Graph) -> fx.Node | None:
    """Return the output node; None in a subgraph with a single value."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return output if isinstance(output.args[0], (list, tuple)) else None


def _outputs(output: fx.Node) -> list[Any]:
    values: Any = output.args[0]
    return list(values)


def _is_overwritten(value: Any, target: Any, final: dict[Any, Any]) -> bool:
    """Tell whether ``value``, copied to ``target`` at the end, lies where others write."""
    if not isinstance(value, fx.Node):
        return False
    written = _written_value(value)
    if written is not None:
        buffer = _buffer(written)
        return buffer is not None and final.get(buffer) is not written
    return root_of(value) is not target and _is_first_value(value, final)


def _is_alias(value: Any, final: dict[Any, Any]) -> bool:
    """Tell whether ``value``, returned, lies in an input that an operator of ours writes."""
    if not isinstance(value, fx.Node):
        return False
    written = _written_value(value)
    return _is_first_value(value, final) if written is None else _buffer(written) is not None


def _is_first_value(value: fx.Node, final: dict[Any, Any]) -> bool:
    """Tell whether ``value`` is what a buffer was before an operator of ours wrote its last."""
    last = final.get(root_of(value))
    return isinstance(last, fx.Node) and _written_value(last) is not None


def _kept(value: fx.Node, kept: dict[fx.Node, fx.Node]) -> fx.Node:
    if value not in kept:
        kept[value] = put_snapshot(value, value)
    return kept[value]


def _written_value(node: fx.Node) -> fx.Node | None:
    """Return the result of an operator of ours that ``node`` is, or is a view of."""
    while not _is_written(node):
        if not is_view(node) or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return node


def _buffer(written: fx.Node) -> fx.Node | None:
    """Return the graph input that ``written`` is a later value of, None for memory made inside."""
    node: Any = written
    while _is_written(node):
        bases = mutated_bases(node.args[0])
        # The results of the call itself come first; operators that mutate return none.
        node = bases[node.args[1] - 1]
    return node if node.op in ("placeholder", "get_attr") else None


def _is_written(node: fx.Node) -> bool:
    return (
        node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and is_mutation(node.args[0])
    )


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return storage_id(value) if isinstance(value, Tensor) else None
