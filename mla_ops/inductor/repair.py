"""The opt-in repair: where an older value is alive through a slice, the slice is copied.

A buffer that is mutated while an older value of it is read afterwards cannot be mutated in
place: Inductor clones all of it, and copies all of it back. A snapshot of the part that is read,
taken before the mutation, leaves the buffer free.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mla_ops.inductor.nodes import is_mutation, is_view, mutated_bases, size_of
from mla_ops.inductor.snapshot import put_snapshot

__all__ = ["keep_slices"]

_COPY = torch.ops.aten.copy_.default


def keep_slices(graph: fx.Graph) -> int:
    """Put ``mla_ops::snapshot`` behind each slice that outlives a mutation of its buffer.

    Args:
        graph: the functional graph, just before Inductor reinplaces; changed in place.

    Returns:
        How many slices are copied.
    """
    copied = 0
    for node in list(graph.nodes):
        if is_mutation(node):
            for base in mutated_bases(node):
                copied += _keep_slices_of(base, node)
    return copied


def _keep_slices_of(base: fx.Node, mutation: fx.Node) -> int:
    """Copy the slices of ``base`` that are read after ``mutation``, if that is all that is."""
    readers = [(view, user) for view, user in _readers(base) if mutation < user]
    views = list(dict.fromkeys(view for view, _ in readers))
    if any(not _is_smaller(view, base) or not _before(view, mutation) for view in views):
        return 0
    for view in views:
        kept = put_snapshot(view, view)
        for _, user in [pair for pair in readers if pair[0] is view]:
            user.replace_input_with(view, kept)
    return len(views)


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (view of ``node`` or itself, a node that reads it), views followed."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        elif not (user.target is _COPY and user.args[0] is node and user.args[1] is not node):
            yield node, user


def _is_smaller(view: fx.Node, base: fx.Node) -> bool:
    part, whole = size_of(view.meta.get("val")), size_of(base.meta.get("val"))
    return part is not None and whole is not None and part.bytes < whole.bytes


def _before(view: fx.Node, mutation: fx.Node) -> bool:
    """Move ``view`` and the views it is taken from before ``mutation``; False if it cannot be."""
    chain: list[fx.Node] = []
    node = view
    while mutation < node:
        chain.append(node)
        if any(mutation < other for other in node.all_input_nodes[1:]):
            return False
        node = node.all_input_nodes[0]
    for node in reversed(chain):
        mutation.prepend(node)
    return True
