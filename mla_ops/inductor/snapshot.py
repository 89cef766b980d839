"""The default correctness pass: a copy that one of our operators mutates stays a copy.

Inductor drops a clone as a no-op, or lets the reinplacing pass take the source of a copy for the
mutated base, so that ``y = kv.clone(); append_kv_(kv, ...); append_kv_(y, ...)`` makes y alias
kv. Seen on torch 2.11, 2.13 and 2.14.1, also with ``torch.cat([kv])`` and ``kv.repeat(1, ...)``.
An opaque operator in place of the copy cannot be dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mla_ops.inductor.nodes import is_mutation, mutated_bases
from mla_ops.ops._library import LIBRARY

__all__ = ["keep_copies", "put_snapshot", "snapshot_op"]

_NAME = "snapshot"


def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _define() -> Any:
    packet = getattr(torch.ops.mla_ops, _NAME, None)
    if packet is None:
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        LIBRARY.define(f"{_NAME}(Tensor tensor) -> Tensor", tags=tags)
        LIBRARY.impl(_NAME, _snapshot, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mla_ops::{_NAME}", _snapshot, lib=LIBRARY)
        packet = getattr(torch.ops.mla_ops, _NAME)
    return packet.default


snapshot_op = _define()
_CLONE = torch.ops.aten.clone.default
# Operators that write nothing of another tensor into their result: a base made by them is fresh.
_FACTORY_PREFIXES = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "rand", "arange")


def keep_copies(graph: fx.Graph) -> None:
    """Put ``mla_ops::snapshot`` behind every copy that an operator of ours mutates.

    Args:
        graph: the functional joint graph, before Inductor's own passes; changed in place.
    """
    for node in list(graph.nodes):
        if is_mutation(node):
            for base in mutated_bases(node):
                if _may_be_dropped(base):
                    _protect(base)


def _may_be_dropped(base: fx.Node) -> bool:
    """Tell whether Inductor could take ``base`` for another tensor's memory."""
    if base.op != "call_function" or base.target is snapshot_op:
        return False
    name = getattr(base.target, "__name__", str(base.target))
    if name == "getitem":
        return False
    if name.removeprefix("aten.").startswith(_FACTORY_PREFIXES):
        return False
    return any(isinstance(source, fx.Node) for source in base.all_input_nodes)


def _protect(base: fx.Node) -> None:
    """Make the copy opaque: a clone is replaced, any other producer gets a snapshot behind it."""
    source: Any = base.args[0] if base.target is _CLONE and _keeps_layout(base) else base
    kept = put_snapshot(source, base)
    base.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def put_snapshot(source: fx.Node, after: fx.Node) -> fx.Node:
    """Return a new snapshot of ``source``, placed after the node ``after`` of the same value."""
    with after.graph.inserting_after(after):
        kept = after.graph.call_function(snapshot_op, (source,))
    kept.meta.update(after.meta)
    # Where Inductor finds the strides to hand over. Else a layout of its own choice passes through
    # (other strides of a dimension of size 1), and what mutates the snapshot is given a copy of
    # it: torch 2.11 and 2.13 then fail in the scheduler.
    kept.meta.pop("eager_input_vals", None)
    if isinstance(source.meta.get("val"), Tensor):
        kept.meta["eager_input_vals"] = ((source.meta["val"],), {})
    return kept


def _keeps_layout(clone: fx.Node) -> bool:
    source = clone.args[0]
    if not isinstance(source, fx.Node):
        return False
    before, after = source.meta.get("val"), clone.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return bool(before.clone().stride() == after.stride())
