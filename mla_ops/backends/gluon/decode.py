"""The launcher of the Gluon decode and combine kernels; it keeps no state between calls."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_ops._torch import on_device_of, streaming_multiprocessors
from mla_ops.backends.gluon.combine_kernels import _mla_combine_kernel
from mla_ops.backends.gluon.decode_kernels import _mla_decode_kernel
from mla_ops.shapes import ceil_div

__all__ = ["DecodeConfig", "decode_config", "mla_decode_out"]

TILE_TOKENS = 64
_LATENT, _HALF, _ROPE = 512, 256, 64
_LEAST = torch.finfo(torch.float32).tiny
_BATCH_BUCKETS = (1, 32, 128, 1024, 4096)
# The combine kernel merges up to so many parts in one short pass: a few SMs more would cost more
# than they bring.
_FEW_PARTS = 32
# Columns that a block of the combine kernel merges, by the parts it merges at once: timed.
_MERGE_WIDTHS = {4: 128, 8: 64, 16: 32, 32: 32, 64: 8, 128: 4}
# Blocks of the combine kernel beyond which each of them merges several units.
_MERGE_BLOCKS = 4096
_BOX_LAYOUT = {
    torch.bfloat16: gl.NVMMASharedLayout.get_default_for([TILE_TOKENS, 64], gl.bfloat16),
    torch.float16: gl.NVMMASharedLayout.get_default_for([TILE_TOKENS, 64], gl.float16),
}


class DecodeConfig(NamedTuple):
    """What of a call is compiled into the kernels, and how they are launched; shapes decide."""

    row_tile: int  # N, query rows of a block
    row_groups: int
    batch_bucket: int
    workers: int  # decode blocks of a row group
    decode_warps: int
    combine_warps: int
    combine_splits: int
    combine_parts: int  # E, parts that the combine kernel merges in one pass
    combine_width: int  # W, columns that one of its blocks merges


def decode_config(
    batch_size: int, num_rows: int, multiprocessors: int, *, capacity: int
) -> DecodeConfig:
    """Choose the kernels of a call.

    Args:
        batch_size: B.
        num_rows: query rows of a sequence, S * H.
        multiprocessors: SMs of the device.
        capacity: tokens a row of the block table has room for, M * P.

    Source: variants timed on an H200, scripts/bench_decode.py.
    """
    row_tile = _row_tile(batch_size, num_rows, capacity)
    groups = ceil_div(num_rows, row_tile)
    workers = max(multiprocessors // groups, 1)
    parts = max(workers // batch_size, 1)
    if _FEW_PARTS < parts <= _FEW_PARTS * 5 // 4:
        parts, workers = _FEW_PARTS, _FEW_PARTS * batch_size
    tiles = max(ceil_div(capacity, TILE_TOKENS), 1)
    bucket = next(size for size in _BATCH_BUCKETS if batch_size <= size)
    # Four warps hold 32 rows, but not a long plan beside.
    wide = bucket > 1024
    # Sequences of more parts than most take several passes.
    most = min(parts, tiles)
    at_once = min(max(1 << (most - most // 16 - 1).bit_length(), 4), 128)
    width = _MERGE_WIDTHS[at_once]
    units = row_tile // 8 * (_LATENT // width)
    blocks = batch_size * groups
    return DecodeConfig(
        *(row_tile, groups, bucket, workers),
        decode_warps=8 if row_tile == 64 or (row_tile == 32 and wide) else 4,
        # A long plan takes four.
        combine_warps=4 if bucket > 128 else 2,
        combine_splits=min(units, max(_MERGE_BLOCKS // blocks, 8)),
        combine_parts=at_once,
        combine_width=width,
    )


def _row_tile(batch_size: int, num_rows: int, capacity: int) -> int:
    """Choose the rows of a block.

    The smaller they are, the fewer parts a sequence is split into, which have to be merged; the
    more often L2 has to serve its keys, of which there are up to batch_size * capacity.
    """
    tokens = batch_size * capacity
    if num_rows <= 16:
        return 16
    if num_rows <= 32:
        return 16 if tokens <= 2**16 and batch_size <= 16 else 32
    if num_rows <= 64:
        if tokens <= 2**13 and batch_size <= 8:
            return 16
        return 32 if tokens <= 2**17 and batch_size <= 64 else 64
    return 32 if tokens <= 2**15 and num_rows <= 128 else 64


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
    with on_device_of(q):
        _launch(
            *(q, kv_cache, block_table, cache_seqlens, out, lse, attn_sink),
            qk_scale=_qk_scale(softmax_scale),
            causal=causal and q.shape[1] > 1,
        )


def _qk_scale(softmax_scale: float) -> float:
    """Return the scale in powers of two; of 0 the least normal one, as 0 * inf would be NaN."""
    scale = softmax_scale * math.log2(math.e)
    return math.copysign(max(abs(scale), _LEAST), scale)


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
    page_rows = page_size if pages == 1 else kv_cache.stride(0) // kv_cache.stride(1)
    rows = seqlen_q * heads
    capacity = block_table.shape[1] * page_size
    multiprocessors = streaming_multiprocessors(q.device)
    config = decode_config(batch, rows, multiprocessors, capacity=capacity)
    # Bounded by shapes alone: one block an SM, and no more than the table has tiles.
    workers = min(config.workers, batch * max(ceil_div(capacity, TILE_TOKENS), 1))
    part_out, part_lse = _partials(out, config, workers)
    kv_half, kv_rope = _boxes(kv_cache, page_rows)
    sink = part_lse if attn_sink is None else attn_sink
    shared = (batch, heads, rows, capacity)
    strides = (*_strides(out, (0, 1, 2, 3)), *_strides(lse, (0, 1, 2)))
    options = {"N": config.row_tile, "RG": config.row_groups, "BP": config.batch_bucket}
    options |= {"SINK": attn_sink is not None, "PDL": True, "launch_pdl": True}
    _mla_decode_kernel[(_blocks(workers * config.row_groups, multiprocessors),)](
        *(kv_half, kv_rope, q, block_table, cache_seqlens, sink, out, lse),
        *(part_out, part_lse, qk_scale, *shared, workers),
        *(pages, page_rows, block_table.stride(0), *_strides(q, (0, 1, 2)), *strides),
        P=page_size,
        ROPE=head_dim - _LATENT,
        CAUSAL=causal,
        NW=config.decode_warps,
        num_warps=config.decode_warps,
        **options,
    )
    _mla_combine_kernel[(batch * config.row_groups, config.combine_splits)](
        *(cache_seqlens, sink, out, lse, part_out, part_lse, *shared, workers, *strides),
        SPLIT=config.combine_splits,
        E=config.combine_parts,
        W=config.combine_width,
        NW=config.combine_warps,
        num_warps=config.combine_warps,
        **options,
    )


def _blocks(working: int, multiprocessors: int) -> int:
    """Return the blocks to launch: where more than half of the SMs get one, all do.

    Those without work linger (schedule_kernels.py), so that the combine kernel spreads evenly:
    scripts/bench_decode.py --shapes 32,16,1024, which keeps 128 of 132 SMs at work, takes 15.6 us
    on an H200, and 16.4 without. In half of the SMs there is room for all of it.
    """
    return max(working, multiprocessors) if working > multiprocessors // 2 else working


def _partials(out: Tensor, config: DecodeConfig, workers: int) -> tuple[Tensor, Tensor]:
    """Allocate the partial results, in out's dtype, and their log-sum-exps, in float32, as one."""
    slots = workers * config.row_groups * (1 if config.batch_bucket == 1 else 2)
    held = slots * config.row_tile
    words = held * (1 + _LATENT * out.element_size() // 4)
    part_lse = torch.empty((words,), dtype=torch.float32, device=out.device)
    return part_lse[held:].view(out.dtype), part_lse


def _boxes(kv_cache: Tensor, page_rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Describe the pool to TMA as rows, read in boxes of half a latent and of a rope."""
    pages, page_size, _, head_dim = kv_cache.shape
    span, strides = [(pages - 1) * page_rows + page_size, head_dim], [kv_cache.stride(1), 1]
    tokens, layout = min(page_size, TILE_TOKENS), _BOX_LAYOUT[kv_cache.dtype]
    kv_half = TensorDescriptor(kv_cache, span, strides, [tokens, _HALF], layout)
    return kv_half, TensorDescriptor(kv_cache, span, strides, [tokens, _ROPE], layout)


def _strides(tensor: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(tensor.stride(dim) for dim in dims)
