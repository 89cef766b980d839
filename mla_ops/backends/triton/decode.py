"""mla_decode by the portable kernel pair: configuration by shape and device, no autotuning."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.backends.triton.decode_kernels import combine_kernel, decode_kernel
from mla_ops.backends.triton.launch import INTERPRETED, on_device_of
from mla_ops.shapes import ceil_div

__all__ = ["Config", "choose", "mla_decode_out"]

_LOG2E = 1.4426950408889634
# Compiled variants by batch: the plan reads the lengths as one vector of that size.
_BATCH_BLOCKS = (1, 16, 64, 256, 1024, 4096)
# Programs while interpreting: enough to split sequences, few enough to be quick.
_INTERPRETED_PROGRAMS = 4


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
    pdl: bool


@cache
def _device(index: int) -> _Device:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    return _Device(properties.multi_processor_count, shared, properties.major >= 9)


def choose(rows: int, batch: int, dtype: torch.dtype, shared_memory: int) -> Config:
    """Choose tile sizes from the query rows (S * H), the batch and the device's shared memory."""
    small = shared_memory < 160 * 1024
    if dtype == torch.float32:
        return Config(16, 16, 4, 2, 1)
    if rows <= 16:
        if small or batch >= 16:
            return Config(16, 32, 4, 3, 1 if small else 2)
        return Config(16, 64, 8, 3, 1)
    if small:
        return Config(32 if rows > 16 else 16, 32, 8, 2, 1)
    if rows <= 32:
        return Config(32, 64, 8, 2, 1)
    return Config(64, 64, 8, 2, 1)


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
    """Write attention by the main kernel and its combine; plans on device, ignores metadata."""
    batch, seqlen_q, heads, head_dim = q.shape
    pages, page_size, _, _ = kv_cache.shape
    latent = out.shape[-1]
    rows = seqlen_q * heads
    device = _Device(_INTERPRETED_PROGRAMS, 232448, False)
    if not INTERPRETED:
        device = _device(q.device.index)
    config = choose(rows, batch, q.dtype, device.shared_memory)
    groups = ceil_div(rows, config.block_h)
    workers = max(device.multiprocessors * config.per_sm // groups, 1)
    programs = workers * groups
    # Partials are averages of values, so they fit the inputs' range; bfloat16 stays bfloat16.
    partial_dtype = torch.float32 if INTERPRETED else q.dtype
    partial = torch.empty(
        (2 * programs, config.block_h, latent), dtype=partial_dtype, device=q.device
    )
    partial_lse = torch.empty((2 * programs, config.block_h), device=q.device)
    max_pages = block_table.shape[1]
    sink = lse if attn_sink is None else attn_sink
    batch_block = next(block for block in _BATCH_BLOCKS if block >= batch)
    shared = {
        "LATENT": latent,
        "PAGE_SIZE": page_size,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "GROUPS": groups,
        "BATCH_BLOCK": batch_block,
        "SINK": attn_sink is not None,
        "PDL": device.pdl,
    }
    columns, splits, share, warps = _combine(batch * groups, latent, rows)
    with on_device_of(q):
        decode_kernel[(programs,)](
            *(q, kv_cache, block_table, cache_seqlens, sink, out, lse, partial, partial_lse),
            *(batch, heads, seqlen_q, pages, max_pages, block_table.stride(0)),
            *(kv_cache.stride(0), kv_cache.stride(1), *q.stride()[:3], *out.stride()),
            *(*lse.stride(), softmax_scale * _LOG2E),
            ROPE=head_dim - latent,
            STAGES=config.stages,
            CAUSAL=causal and seqlen_q > 1,
            WIDE=INTERPRETED or q.dtype == torch.float32,
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=device.pdl,
            **shared,
        )
        combine_kernel[(batch * groups, share)](
            *(cache_seqlens, sink, out, lse, partial, partial_lse),
            *(batch, heads, seqlen_q, max_pages, workers, *out.stride(), *lse.stride()),
            SPLITS=splits,
            COLUMNS=columns,
            num_warps=warps,
            launch_pdl=device.pdl,
            **shared,
        )


def _combine(groups: int, latent: int, rows: int) -> tuple[int, int, int, int]:
    """Return columns of a unit, splits read at once, programs a row group, warps.

    The reduction over splits has to stay inside a thread: few columns or few warps. One row
    group alone is spread over 128 programs, few over 32, many over 16.
    """
    share = 128 if groups == 1 else 32 if groups <= 8 else 16
    columns = min(latent, 128 if groups == 1 else 256)
    return columns, 32 if groups == 1 else 8, min(share, rows * (latent // columns)), 1


def warmup(
    *,
    num_heads_q: int,
    batch_sizes: tuple[int, ...],
    seqlen_q: int = 1,
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> None:
    """Compile what decodes of these batch sizes need, by running them on one page."""
    head_dim = latent_dim + rope_dim
    kv_cache = torch.zeros((1, page_size, 1, head_dim), dtype=dtype, device=device)
    for batch in batch_sizes:
        q = torch.zeros((batch, seqlen_q, num_heads_q, head_dim), dtype=dtype, device=device)
        table = torch.zeros((batch, 1), dtype=torch.int32, device=device)
        lengths = torch.ones((batch,), dtype=torch.int32, device=device)
        out = q.new_empty((batch, seqlen_q, num_heads_q, latent_dim))
        lse = torch.empty((batch, seqlen_q, num_heads_q), device=device).transpose(1, 2)
        mla_decode_out(
            *(q, kv_cache, table, lengths, None, None, out, lse),
            softmax_scale=1.0,
            causal=True,
            attn_sink=None,
        )
