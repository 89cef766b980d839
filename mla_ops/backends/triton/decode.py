"""mla_decode by the portable kernel pair: configuration by shape and device, no autotuning."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops._torch import on_device_of
from mla_ops.backends.triton.combine_kernels import combine_kernel
from mla_ops.backends.triton.decode_kernels import decode_kernel
from mla_ops.backends.triton.launch import INTERPRETED
from mla_ops.shapes import ceil_div

__all__ = ["Combine", "Config", "choose", "choose_combine", "mla_decode_out"]

_LOG2E = 1.4426950408889634
# Compiled variants by batch: the plan reads the lengths as one vector of that size, and in
# chunks of the last one beyond it.
_BATCH_BLOCKS = (1, 16, 64, 256, 1024)
# Programs while interpreting: enough to split sequences, few enough to be quick.
_INTERPRETED_PROGRAMS = 4
# Tokens a sequence can have with int32 positions, a tile kept free for rounding up.
_MOST_TOKENS = 2**31 - 1024


class Config(NamedTuple):
    """What is compiled for a class of shapes; measured by scripts/bench_decode.py."""

    block_h: int
    block_n: int
    warps: int
    stages: int
    per_sm: int


class _Device(NamedTuple):
    multiprocessors: int
    shared_memory: int
    major: int


@cache
def _device(index: int | None) -> _Device:
    if INTERPRETED:
        return _Device(_INTERPRETED_PROGRAMS, 232448, 0)
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    return _Device(properties.multi_processor_count, shared, properties.major)


def choose(
    rows: int, batch: int, tokens: int, dtype: torch.dtype, shared_memory: int, major: int
) -> Config:
    """Choose the main kernel's tiles.

    Args:
        rows: query rows of a sequence, S * H.
        batch: B.
        tokens: what the block table has room for, B * M * P.
        dtype: dtype of q.
        shared_memory: bytes a program can have.
        major: compute capability's first number.

    Source: scripts/bench_decode.py on an H200; the limits of the other devices are those of the
        compiled kernels.
    """
    if dtype == torch.float32:
        return Config(16, 16, 8, 2, 1)
    if rows <= 16:
        if shared_memory < 168 * 1024:
            return Config(16, 32, 4, 3, 1)
        if batch >= 64 or tokens <= 2048:
            return Config(16, 32, 4, 3, 2)
        return Config(16, 64, 8, 3, 1)
    if major != 9:
        # Two tiles in flight where they fit: with one, loads wait for products.
        return Config(32, 32, 8, 2 if shared_memory < 128 * 1024 else 3, 1)
    # 64 rows are 1.5 times as fast as 32: half the key traffic.
    return Config(32, 64, 8, 3, 1) if rows <= 32 else Config(64, 64, 8, 2, 1)


class Combine(NamedTuple):
    """How a row group's partials are merged; the reduction must stay inside a thread."""

    columns: int
    splits: int
    programs: int
    warps: int


def choose_combine(row_groups: int, block_h: int, tokens: int, latent: int) -> Combine:
    """Choose the combine kernel's tiles: the fewer row groups, the more programs each."""
    if row_groups == 1:
        combine = Combine(64, 32, 128, 1) if tokens <= 4096 else Combine(64, 128, 128, 2)
    elif row_groups <= 8 and block_h == 64:
        # Two row groups are split into up to 66 parts each: most of them at once.
        combine = Combine(64, 64 if row_groups == 2 and tokens > 2048 else 32, 512, 1)
    elif row_groups <= 32:
        combine = Combine(128, 32, 128, 1)
    elif block_h == 16:
        combine = Combine(512, 4, 16, 2)
    else:
        combine = Combine(256, 8, 32, 1)
    columns = min(combine.columns, latent)
    units = block_h * (latent // columns)
    return combine._replace(columns=columns, programs=min(combine.programs, units))


class _Launch(NamedTuple):
    programs: int
    workers: int
    row_groups: int
    block_h: int
    combine: Combine
    main_options: dict[str, Any]
    combine_options: dict[str, Any]


@lru_cache(maxsize=4096)
def _launch(
    device_index: int | None,
    dtype: torch.dtype,
    batch: int,
    seqlen_q: int,
    heads: int,
    latent: int,
    rope: int,
    page_size: int,
    row_stride: int,
    max_pages: int,
    causal: bool,
    sink: bool,
    unit_out: bool,
) -> _Launch:
    """Return grids and constants of a launch: a function of shapes and strides alone."""
    device = _device(device_index)
    rows = seqlen_q * heads
    tokens = batch * max_pages * page_size
    config = choose(rows, batch, tokens, dtype, device.shared_memory, device.major)
    groups = ceil_div(rows, config.block_h)
    workers = max(device.multiprocessors * config.per_sm // groups, 1)
    combine = choose_combine(batch * groups, config.block_h, tokens, latent)
    pdl = device.major >= 9
    shared = {
        "LATENT": latent,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "GROUPS": groups,
        "BATCH_BLOCK": next((size for size in _BATCH_BLOCKS if size >= batch), _BATCH_BLOCKS[-1]),
        "CHUNKED": batch > _BATCH_BLOCKS[-1],
        "SINK": sink,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    main_options = {
        "ROPE": rope,
        "PAGE_SIZE": page_size,
        "ROW_STRIDE": row_stride,
        "STAGES": config.stages,
        "ONE_QUERY": seqlen_q == 1,
        "CAUSAL": causal and seqlen_q > 1,
        "UNIT_OUT": unit_out,
        "WIDE": INTERPRETED or dtype == torch.float32,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    combine_options = {
        "SPLITS": combine.splits,
        "COLUMNS": combine.columns,
        "num_warps": combine.warps,
    }
    return _Launch(
        *(workers * groups, workers, batch * groups, config.block_h, combine),
        *(shared | main_options, shared | combine_options),
    )


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
    """Write attention by the main kernel and its combine; plans on device, ignores metadata.

    Args:
        q: [B, S, H, D], any strides with last stride 1.
        kv_cache: [N, P, 1, D], any page and row strides with last stride 1.
        block_table: [B, M] int32, last stride 1.
        cache_seqlens: [B] int32.
        tile_scheduler_metadata: not read.
        num_splits: not read.
        out: [B, S, H, V], dtype of q or float32, any strides.
        lse: [B, H, S] float32, any strides.
        softmax_scale: factor of the logits.
        causal: query j of S sees keys ``< cache_seqlens - S + j + 1``.
        attn_sink: [H] float32 or None.

    Capture: grids and scratch follow from shapes and the device; lengths, pages and values may
        change between replays.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    pages, page_size, _, _ = kv_cache.shape
    latent = out.shape[3]
    max_pages = block_table.shape[1]
    launch = _launch(
        *(q.device.index, q.dtype, batch, seqlen_q, heads, latent, head_dim - latent, page_size),
        *(kv_cache.stride(1), max_pages, causal, attn_sink is not None, out.stride(3) == 1),
    )
    # Partials are averages of values, so they fit the range of out's own dtype.
    slots = (2 * launch.programs, launch.block_h)
    partial_dtype = torch.float32 if INTERPRETED else out.dtype
    partial = torch.empty((*slots, latent), dtype=partial_dtype, device=q.device)
    partial_lse = torch.empty(slots, dtype=torch.float32, device=q.device)
    sink = lse if attn_sink is None else attn_sink
    max_tokens = min(max_pages * page_size, _MOST_TOKENS)
    strides = (*out.stride(), *lse.stride())
    with on_device_of(q):
        decode_kernel[(launch.programs,)](
            *(q, kv_cache, block_table, cache_seqlens, sink, out, lse, partial, partial_lse),
            *(batch, heads, seqlen_q, pages, max_tokens, block_table.stride(0)),
            *(kv_cache.stride(0), *q.stride()[:3], *strides, softmax_scale * _LOG2E),
            **launch.main_options,
        )
        combine_kernel[(launch.row_groups, launch.combine.programs)](
            *(cache_seqlens, sink, out, lse, partial, partial_lse),
            *(batch, heads, seqlen_q, max_tokens, launch.workers, *strides),
            **launch.combine_options,
        )
