"""merge_states: one program a row (sequence, query, head), the shards in a loop."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_ops._torch import on_device_of

__all__ = ["merge_states"]


@triton.jit(do_not_specialize=["shards", "seqlen_q", "heads"])
def _merge_states_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    shards,
    seqlen_q,
    heads,
    outs_k,
    outs_b,
    outs_s,
    outs_h,
    outs_v,
    lses_k,
    lses_b,
    lses_h,
    lses_s,
    out_b,
    out_s,
    out_h,
    out_v,
    lse_b,
    lse_h,
    lse_s,
    V: tl.constexpr,
    V_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    query = row // heads % seqlen_q
    batch = row // heads // seqlen_q
    column = tl.arange(0, V_BLOCK)
    inside = column < V
    # Offsets of any layout may pass 2**31 elements.
    wide_column = column.to(tl.int64)
    lses = lses_ptr + batch * lses_b + head * lses_h + query * lses_s
    outs = outs_ptr + batch * outs_b + query * outs_s + head * outs_h + wide_column * outs_v

    largest = -float("inf")
    for shard in range(shards):
        largest = tl.maximum(largest, tl.load(lses + tl.cast(shard, tl.int64) * lses_k))
    # All shards empty: any finite reference keeps exp(-inf - reference) at 0.
    reference = tl.where(largest == -float("inf"), 0.0, largest).to(WIDE)
    total = reference * 0
    merged = tl.zeros([V_BLOCK], WIDE)
    for shard in range(shards):
        step = tl.cast(shard, tl.int64)
        lse = tl.load(lses + step * lses_k).to(WIDE)
        weight = tl.exp(lse - reference)
        # An empty shard's out may hold NaN: it is not read.
        width = tl.where(lse == -float("inf"), 0, V)
        value = tl.load(outs + step * outs_k, mask=column < width, other=0).to(WIDE)
        merged += weight * value
        total += weight
    empty = largest == -float("inf")
    merged = merged / tl.where(empty, 1.0, total)
    store = out_ptr + batch * out_b + query * out_s + head * out_h + wide_column * out_v
    tl.store(store, merged.to(out_ptr.dtype.element_ty), mask=inside)
    value = tl.where(empty, -float("inf"), reference + tl.log(tl.where(empty, 1.0, total)))
    store = lse_ptr + batch * lse_b + head * lse_h + query * lse_s
    tl.store(store, value.to(tl.float32))


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Weigh every shard's output by the share of its keys in the whole softmax.

    Args:
        outs: [K, B, S, H, V], any strides.
        lses: [K, B, H, S] float32, any strides.
        out: [B, S, H, V], any strides.
        lse: [B, H, S] float32, any strides.
    """
    shards, batch, seqlen_q, heads, width = outs.shape
    with on_device_of(outs):
        _merge_states_kernel[(batch * seqlen_q * heads,)](
            outs,
            lses,
            out,
            lse,
            shards,
            seqlen_q,
            heads,
            *outs.stride(),
            *lses.stride(),
            *out.stride(),
            *lse.stride(),
            V=width,
            V_BLOCK=triton.next_power_of_2(width),
            WIDE=tl.float64 if outs.dtype == torch.float64 else tl.float32,
            num_warps=4,
        )
