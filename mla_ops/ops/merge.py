"""merge_states: combine attention over disjoint KV shards by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.formats import DENSE_DTYPES
from mla_ops.ops._library import register
from mla_ops.ops._selection import device_kernel
from mla_ops.ops.decode import MLAOutput
from mla_ops.shapes import lse_strides

__all__ = ["merge_states"]


def merge_states(outs: Tensor, lses: Tensor) -> MLAOutput:
    """Merge the partial results of K disjoint shards of the keys into the whole result.

    Args:
        outs: [K, B, S, H, V] partial outputs, any strides.
        lses: [K, B, H, S] float32 natural-log lse of each shard; ``-inf`` marks a shard without
            keys, whose ``outs`` are ignored whatever they hold.

    Returns:
        MLAOutput: out [B, S, H, V] in the dtype of ``outs``; lse [B, H, S] float32. Rows empty
        in every shard are out 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Capture: shapes are constants of the graph, values may change between replays.
    Source: the split-KV combine of FlashDecoding.
    """
    return MLAOutput(*_op(outs, lses))


_SCHEMA = "merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)"


def _check(outs: Tensor, lses: Tensor) -> None:
    if outs.dtype not in DENSE_DTYPES:
        raise TypeError(
            "merge_states: outs must be float64, float32, bfloat16 or float16, got "
            f"{outs.dtype} (convert it)"
        )
    if lses.dtype != torch.float32:
        raise TypeError(f"merge_states: lses must be float32, got {lses.dtype} (use .float())")
    if outs.dim() != 5 or outs.shape[0] == 0:
        raise ValueError(
            "merge_states: outs must be [K, B, S, H, V] with K >= 1, got shape "
            f"{tuple(outs.shape)} (stack the shards' out along a new first dimension)"
        )
    shards, batch, seqlen_q, heads, _ = outs.shape
    if tuple(lses.shape) != (shards, batch, heads, seqlen_q):
        raise ValueError(
            "merge_states: lses must be [K, B, H, S] = "
            f"{(shards, batch, heads, seqlen_q)}, got shape {tuple(lses.shape)} "
            "(stack the shards' lse along a new first dimension)"
        )
    if lses.device != outs.device:
        raise ValueError(
            f"merge_states: lses must be on {outs.device} like outs, got {lses.device} (move it)"
        )


def _empty_output(outs: Tensor) -> tuple[Tensor, Tensor]:
    _, batch, seqlen_q, heads, width = outs.shape
    out = torch.empty((batch, seqlen_q, heads, width), dtype=outs.dtype, device=outs.device)
    lse = torch.empty_strided(
        (batch, heads, seqlen_q),
        lse_strides(seqlen_q, heads),
        dtype=torch.float32,
        device=outs.device,
    )
    return out, lse


def _fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    _check(outs, lses)
    return _empty_output(outs)


def _dispatch(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    _check(outs, lses)
    out, lse = _empty_output(outs)
    if lse.numel():
        device_kernel("merge_states", outs.device)(outs, lses, out, lse)
    return out, lse


_op = register(_SCHEMA, kernel=_dispatch, fake=_fake)
