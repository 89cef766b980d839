"""append_kv_: one program a token, one masked row of latent and one of rope."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_ops._torch import on_device_of

__all__ = ["append_kv_"]


@triton.jit(do_not_specialize=["pages"])
def _append_kv_kernel(
    kv_ptr,
    kv_c_ptr,
    k_pe_ptr,
    slots_ptr,
    pages,
    page_stride,
    row_stride,
    kv_c_stride,
    k_pe_stride,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, LATENT_BLOCK)
    rope_column = tl.arange(0, ROPE_BLOCK)
    # The three loads are independent: reading the token before its slot is known hides one
    # round trip to memory.
    slot = tl.load(slots_ptr + token)
    latent = tl.load(kv_c_ptr + token * kv_c_stride + column, mask=column < LATENT, other=0)
    if ROPE > 0:
        rope_ptr = k_pe_ptr + token * k_pe_stride + rope_column
        rope = tl.load(rope_ptr, mask=rope_column < ROPE, other=0)
    kept = (slot >= 0) & (slot < pages.to(tl.int64) * PAGE_SIZE)
    row = kv_ptr + (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * row_stride
    tl.store(row + column, latent, mask=kept & (column < LATENT))
    if ROPE > 0:
        tl.store(row + LATENT + rope_column, rope, mask=kept & (rope_column < ROPE))


def append_kv_(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's latent and rope into its slot; skip slots outside the pool."""
    latent, rope = kv_c.shape[1], k_pe.shape[1]
    if slot_mapping.shape[0] == 0:
        return
    with on_device_of(kv_cache):
        _append_kv_kernel[(slot_mapping.shape[0],)](
            kv_cache,
            kv_c,
            k_pe,
            slot_mapping,
            kv_cache.shape[0],
            kv_cache.stride(0),
            kv_cache.stride(1),
            kv_c.stride(0),
            k_pe.stride(0),
            PAGE_SIZE=kv_cache.shape[1],
            LATENT=latent,
            ROPE=rope,
            LATENT_BLOCK=triton.next_power_of_2(latent),
            ROPE_BLOCK=max(triton.next_power_of_2(rope), 1),
            num_warps=2,
        )
