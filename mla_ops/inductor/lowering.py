"""The lowerings that Inductor lacks: of a storage offset, and of operators that mutate."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["forget_lowerings", "lower_mutations", "lower_storage_offset"]

_MUTATING = ("append_kv_", "mla_metadata_out", "mla_decode_out")
# What Inductor had before for each operator lowered here, None if nothing.
_before: dict[Any, Any] = {}


def lower_storage_offset() -> None:
    """Lower aten.sym_storage_offset to the expression it was traced as.

    Without a lowering its fallback runs on tensors rebuilt without an offset: an operator that
    mutates ``kvs[i]`` inside the region then writes layer 0, silently (dynamic shapes).
    """
    from torch._inductor import lowering

    op = torch.ops.aten.sym_storage_offset.default
    if op in lowering.lowerings:
        return
    _before[op] = None

    @lowering.register_lowering(op)
    def sym_storage_offset(_tensor: Any) -> Any:
        from torch._inductor.virtualized import V

        value = V.graph.current_node.meta["val"]
        return getattr(getattr(value, "node", None), "expr", value)


def lower_mutations() -> None:
    """Have what reads a buffer computed before an operator of ours is put in line to write it.

    Inductor computes elementwise values where they are used. It makes the readers of a mutated
    buffer compute theirs first, but only after the operator has taken its place, so that
    ``other.copy_(kv * 2); append_kv_(kv, ...)`` copies what was appended, too (seen on torch
    2.11, 2.13 and 2.14.1).
    """
    for name in _MUTATING:
        op = getattr(torch.ops.mla_ops, name).default
        if op not in _before:
            _lower_mutation(op)


def forget_lowerings() -> None:
    """Give Inductor back what it had for these operators."""
    from torch._inductor import lowering

    while _before:
        op, previous = _before.popitem()
        if previous is None:
            del lowering.lowerings[op]
        else:
            lowering.lowerings[op] = previous


def _lower_mutation(op: Any) -> None:
    from torch._inductor import lowering

    _before[op] = lowering.lowerings.get(op)
    fallback = lowering.fallback_handler(op)
    written = [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.is_write
    ]

    @lowering.register_lowering(op, type_promotion_kind=None)
    def mutate(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        for position, name in written:
            buffer = args[position] if position < len(args) else kwargs[name]
            buffer.realize()
            V.graph.mark_buffer_mutated(buffer.get_name())
        return fallback(*args, **kwargs)
