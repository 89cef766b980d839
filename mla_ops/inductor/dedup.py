"""The opt-in pass: identical metadata computations of one step collapse to one launch.

Inference compilation does no common-subexpression elimination, so that a metadata call in each
of N layers is N launches. In the functional graph a value is one node: two calls with the same
argument nodes see the same lengths, whatever was written in between made new nodes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mla_ops.inductor.nodes import is_view

__all__ = ["collapse_metadata"]


def collapse_metadata(graph: fx.Graph) -> int:
    """Replace repeated metadata calls by the first one.

    Args:
        graph: a functional graph (before reinplacing); changed in place.

    Returns:
        How many calls were removed.
    """
    removed = 0
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.mla_ops.mla_metadata.default:
            key = (_value(node.args), _value(tuple(sorted(node.kwargs.items()))))
            original = first.setdefault(key, node)
            # Two results that leave the graph are two tensors, whatever is in them.
            if original is not node and not (_leaves(original) and _leaves(node)):
                node.replace_all_uses_with(original)
                graph.erase_node(node)
                removed += 1
        elif _is_metadata_out(node):
            key, bases = _split(node)
            original = first.get(key, node)
            if original is not node and bases == _written(original, len(bases)):
                _redirect(graph, node, original)
                removed += 1
            else:
                first[key] = node
    return removed


def _is_metadata_out(node: fx.Node) -> bool:
    return (
        "auto_functionalized" in str(node.target)
        and bool(node.args)
        and node.args[0] is torch.ops.mla_ops.mla_metadata_out.default
    )


def _split(node: fx.Node) -> tuple[Any, list[Any]]:
    """Return the call without its bases as a key, and the bases it rewrites."""
    kwargs: dict[str, Any] = dict(node.kwargs)
    bases = kwargs.pop("_all_bases", None)
    if bases is None:
        bases = [kwargs.pop("tile_scheduler_metadata"), kwargs.pop("num_splits")]
    return _value(tuple(sorted(kwargs.items()))), list(bases)


def _value(argument: Any) -> Any:
    """Return what is equal for equal arguments: the same view, taken anew, is the same value."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_value, argument))
    if isinstance(argument, fx.Node) and argument.op == "call_function" and is_view(argument):
        options = tuple(sorted(argument.kwargs.items()))
        return argument.target, _value(argument.args), _value(options)
    return argument


def _leaves(node: fx.Node) -> bool:
    """Tell whether the graph returns a result of ``node``, or a view of one."""
    return any(
        user.op == "output"
        or ((user.target is operator.getitem or is_view(user)) and _leaves(user))
        for user in node.users
    )


def _written(node: fx.Node, count: int) -> list[Any]:
    """Return the new values of the bases of a functionalised call: its results after returns."""
    values: dict[int, fx.Node] = {
        user.args[1]: user  # type: ignore[misc]
        for user in node.users
        if user.target is operator.getitem
    }
    return [values.get(index + 1) for index in range(count)]


def _redirect(graph: fx.Graph, node: fx.Node, original: fx.Node) -> None:
    results = _written(original, len(node.users) + 1)
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        if index > 0:
            user.replace_all_uses_with(results[index - 1])
        graph.erase_node(user)
    graph.erase_node(node)
