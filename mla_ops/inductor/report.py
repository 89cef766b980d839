"""Telling which line makes a compiled step copy a buffer that our operators mutate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import fx

from mla_ops.inductor.nodes import COPYING, operator_name, root_of, size_of, user_line

__all__ = ["POOL_BYTES", "PoolCopyWarning", "report_pool_copies"]

# 1 MiB: above the activations of a decode step, below any useful pool.
POOL_BYTES = 1 << 20


class PoolCopyWarning(UserWarning):
    """A compiled step copies a whole buffer that an operator mutates."""


def report_pool_copies(graph: fx.Graph, pool_bytes: int, *, strict: bool) -> None:
    """Warn about each copy of a mutated buffer in a graph that is about to be generated.

    Args:
        graph: the graph after Inductor's passes: mutations are direct calls, copies are nodes.
        pool_bytes: bytes of the smallest buffer that counts.
        strict: raise instead.

    Raises:
        RuntimeError: in strict mode, naming the copies and their lines.
    """
    found = list(_pool_copies(graph, pool_bytes))
    if not found:
        return
    text = (
        f"mla_ops.inductor: a compiled step must be without copies of a mutated buffer, got "
        f"{'; '.join(found)} (keep a slice instead of the whole, or take the copy outside the "
        "compiled region)"
    )
    if strict:
        raise RuntimeError(text)
    warnings.warn(text, PoolCopyWarning, stacklevel=2)


def _pool_copies(graph: fx.Graph, pool_bytes: int) -> Iterator[str]:
    mutated = {root_of(argument) for node in graph.nodes for argument in _mutated_by_us(node)}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = operator_name(node.target)
        if name == "aten.copy_":
            target, sources = node.args[0], [node.args[1]]
            if target is node.args[1]:
                # Left behind by the reinplacing pass, and dropped when it is lowered.
                continue
        elif name in COPYING:
            target, sources = node, node.all_input_nodes
        else:
            continue
        size = size_of(target.meta.get("val"))
        roots = {root_of(each) for each in (target, *sources) if isinstance(each, fx.Node)}
        if size is not None and size.bytes >= pool_bytes and roots & mutated:
            yield f"{name} of {size.bytes} bytes at {_line(node)}"


def _mutated_by_us(node: fx.Node) -> Iterator[fx.Node]:
    if getattr(node.target, "namespace", None) != "mla_ops":
        return
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        given = node.args[position] if position < len(node.args) else None
        value = node.kwargs.get(argument.name, given)
        if argument.is_write and isinstance(value, fx.Node):
            yield value


def _line(node: fx.Node) -> str:
    """Name the line of a copy; of one that Inductor added, the line of what mutates it."""
    for each in (node, *_mutations_near(node)):
        line = user_line(each.meta.get("stack_trace"))
        if line is not None:
            return line
    return "an unknown line"


def _mutations_near(node: fx.Node) -> Iterator[fx.Node]:
    roots = {root_of(node), *(root_of(each) for each in node.all_input_nodes)}
    for other in node.graph.nodes:
        if any(root_of(argument) in roots for argument in _mutated_by_us(other)):
            yield other
