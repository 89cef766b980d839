"""The launcher of the Gluon decode and combine kernels; it keeps no state between calls."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_ops.backends.gluon.combine_kernels import _mla_combine_kernel
from mla_ops.backends.gluon.decode_kernels import _mla_decode_kernel
from mla_ops.shapes import DecodeShape, ceil_div

__all__ = ["DecodeConfig", "decode_config", "mla_decode_out", "warmup"]

TILE_TOKENS = 64
_LATENT, _HALF, _ROPE = 512, 256, 64
_BATCH_BUCKETS = (1, 32, 128, 1024, 4096)
_HERE: AbstractContextManager[Any] = contextlib.nullcontext()
_BOX_LAYOUT = {
    torch.bfloat16: gl.NVMMASharedLayout.get_default_for([TILE_TOKENS, 64], gl.bfloat16),
    torch.float16: gl.NVMMASharedLayout.get_default_for([TILE_TOKENS, 64], gl.float16),
}


class DecodeConfig(NamedTuple):
    """What of a call is compiled into the kernels; a function of shapes alone."""

    row_tile: int  # N, query rows of a block
    row_groups: int
    batch_bucket: int
    decode_warps: int
    combine_splits: int
    many_parts: bool


def decode_config(batch_size: int, num_rows: int) -> DecodeConfig:
    """Choose the kernels of a call of ``num_rows`` = S * H query rows a sequence."""
    row_tile = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    groups = ceil_div(num_rows, row_tile)
    bucket = next(size for size in _BATCH_BUCKETS if batch_size <= size)
    # Measured: what spreads one sequence's merge over the device, and no more blocks than needed.
    blocks = bucket * groups
    splits = 128 if blocks == 1 else 32 if blocks <= 32 else 16
    warps = 4 if row_tile == 16 else 8
    return DecodeConfig(row_tile, groups, bucket, warps, splits, blocks <= 32)


def mla_decode_out(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    attn_sink: Tensor | None,
) -> None:
    """Write softmax(scale * q k^T) v over the keys each query sees; plans on the device.

    Raises:
        ValueError: kv_cache does not begin at a multiple of 16 bytes.
    """
    if kv_cache.data_ptr() % 16:
        raise ValueError(
            "mla_decode: kv_cache must begin at a multiple of 16 bytes for backend 'gluon', got "
            f"address {kv_cache.data_ptr():#x} (use backend='triton')"
        )
    device = q.device
    here = _HERE if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    with here:
        _launch(
            *(q, kv_cache, block_table, cache_seqlens, out, lse, attn_sink),
            qk_scale=softmax_scale * math.log2(math.e),
            causal=causal and q.shape[1] > 1,
        )


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_sink: Tensor | None,
    *,
    qk_scale: float,
    causal: bool,
) -> None:
    batch, seqlen_q, heads, head_dim = q.shape
    pages, page_size, _, _ = kv_cache.shape
    row_stride = kv_cache.stride(1)
    page_rows = page_size if pages == 1 else kv_cache.stride(0) // row_stride
    rows = seqlen_q * heads
    config = decode_config(batch, rows)
    groups = config.row_groups
    capacity = block_table.shape[1] * page_size
    # Bounded by shapes alone: one block an SM, and no more than the table has tiles.
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    most = batch * max(ceil_div(capacity, TILE_TOKENS), 1)
    workers = min(max(multiprocessors // groups, 1), most)
    slots = workers * groups * (1 if config.batch_bucket == 1 else 2)
    part_out = torch.empty(
        (slots * config.row_tile * (_LATENT + 2),), dtype=torch.float32, device=q.device
    )
    part_max = part_out[slots * config.row_tile * _LATENT :]
    part_sum = part_max[slots * config.row_tile :]

    span = [(pages - 1) * page_rows + page_size, head_dim]
    box = min(page_size, TILE_TOKENS)
    layout = _BOX_LAYOUT[q.dtype]
    kv_half = TensorDescriptor(kv_cache, span, [row_stride, 1], [box, _HALF], layout)
    kv_rope = TensorDescriptor(kv_cache, span, [row_stride, 1], [box, _ROPE], layout)
    sink = part_out if attn_sink is None else attn_sink
    shared = (batch, heads, rows, capacity)
    strides = (*_strides(out, (0, 1, 2, 3)), *_strides(lse, (0, 1, 2)))
    out_b, out_s, out_h, out_v, lse_b, lse_h, lse_s = strides
    _mla_decode_kernel[(workers * groups,)](
        *(kv_half, kv_rope, q, block_table, cache_seqlens, sink, out, lse),
        *(part_out, part_max, part_sum, qk_scale, *shared),
        *(pages, page_rows, block_table.stride(0), q.stride(0), q.stride(1), q.stride(2)),
        *(out_b, out_s, out_h, out_v, lse_b, lse_h, lse_s),
        N=config.row_tile,
        RG=groups,
        BP=config.batch_bucket,
        P=page_size,
        ROPE=head_dim - _LATENT,
        CAUSAL=causal,
        SINK=attn_sink is not None,
        PDL=True,
        NW=config.decode_warps,
        num_warps=config.decode_warps,
        launch_pdl=True,
    )
    _mla_combine_kernel[(batch * groups, config.combine_splits)](
        *(cache_seqlens, sink, out, lse, part_out, part_max, part_sum, *shared, workers),
        *(out_b, out_s, out_h, out_v, lse_b, lse_h, lse_s),
        N=config.row_tile,
        RG=groups,
        BP=config.batch_bucket,
        SINK=attn_sink is not None,
        PDL=True,
        SPLIT=config.combine_splits,
        MANY=config.many_parts,
        NW=4,
        num_warps=4,
        launch_pdl=True,
    )


def _strides(tensor: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(tensor.stride(dim) for dim in dims)


def warmup(shape: DecodeShape, *, causal: bool = True, attn_sink: bool = False) -> None:
    """Compile the kernels of every call of ``shape``, so that a later capture compiles nothing."""
    batch, seqlen_q, heads = shape.batch_size, shape.seqlen_q, shape.num_heads_q
    device = shape.device
    q = torch.zeros((batch, seqlen_q, heads, shape.head_dim), dtype=shape.dtype, device=device)
    mla_decode_out(
        q,
        q.new_zeros((1, shape.page_size, 1, shape.head_dim)),
        torch.zeros((batch, 1), dtype=torch.int32, device=device),
        torch.zeros((batch,), dtype=torch.int32, device=device),
        None,
        None,
        q.new_empty((batch, seqlen_q, heads, shape.head_dim_v)),
        torch.empty((batch, seqlen_q, heads), device=device).transpose(1, 2),
        softmax_scale=1.0,
        causal=causal,
        attn_sink=torch.zeros((heads,), device=device) if attn_sink else None,
    )
