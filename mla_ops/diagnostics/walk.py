"""Questions about a node of a graph: what it writes, what it is a view of, its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from mla_ops.diagnostics.lines import user_line
from mla_ops.inductor.nodes import is_view, root_of

__all__ = ["ancestors", "descendants", "first_write", "is_view", "line_of", "mutates", "root_of"]

# Of Dynamo's graphs, where calls are Python's: what may return a view of its first argument.
_VIEWS = frozenset(
    (
        *("getitem", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "t"),
        *("transpose", "permute", "movedim", "select", "narrow", "chunk", "split", "unbind"),
        *("expand", "diagonal", "view_as", "detach", "unfold", "as_strided", "swapaxes"),
    )
)


def mutates(node: fx.Node, tensor: fx.Node) -> bool:
    """Tell whether a node writes the memory of ``tensor``, itself or through a view."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    given.update(node.kwargs)
    for argument in schema:
        value = given.get(argument.name)
        info = argument.alias_info
        if info is not None and info.is_write:
            values = value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(each, fx.Node) and root_of(each) is tensor for each in values):
                return True
    return False


def first_write(tensor: fx.Node) -> fx.Node | None:
    """Find the first call in Dynamo's graph that writes ``tensor`` or a view of it."""
    memory = {tensor}
    for node in tensor.graph.nodes:
        if not memory & set(node.all_input_nodes):
            continue
        name = str(getattr(node.target, "__name__", node.target))
        first = node.args[0] if node.args else None
        inplace = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
        is_written = (inplace and first in memory) or node.kwargs.get("out") in memory
        if is_written or any(mutates(node, each) for each in memory):
            return node if node.meta.get("stack_trace") else None
        if name in _VIEWS and first in memory:
            memory.add(node)
    return None


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a node is computed from, the nearest first."""
    yield from _reached(node, lambda each: each.all_input_nodes)


def descendants(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what is computed from a node, the nearest first."""
    yield from _reached(node, lambda each: list(each.users))


def line_of(node: fx.Node) -> str | None:
    """Return the user's "file:line" that made a node, or its nearest user or source."""
    for each in (node, *descendants(node), *ancestors(node)):
        where = user_line(each.meta.get("stack_trace"))
        if where is not None:
            return where
    return None


def _reached(node: fx.Node, step: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    seen, pending = {node}, [node]
    while pending:
        for each in step(pending.pop(0)):
            if each not in seen:
                seen.add(each)
                pending.append(each)
                yield each
