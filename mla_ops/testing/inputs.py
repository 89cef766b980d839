"""Hostile decode inputs: memory that a kernel must not read is poisoned, tables end wildly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops.shapes import ceil_div

__all__ = ["TABLE_TAIL", "DecodeInputs", "make_decode_inputs"]

# Followed as a page number, it leaves any pool; multiplied by a stride in int32, it wraps.
TABLE_TAIL = 2147480000
# Elements between rows, pages and queries of strided tensors: 16 bytes and more in every dtype.
_GAP = 16


class DecodeInputs(NamedTuple):
    """The tensors and constants of one decode call."""

    q: Tensor  # [B, S, H, D]
    kv_cache: Tensor  # [N, P, 1, D]
    block_table: Tensor  # int32 [B, M]
    cache_seqlens: Tensor  # int32 [B]
    softmax_scale: float
    head_dim_v: int


def make_decode_inputs(
    cache_seqlens: Sequence[int] = (0, 1, 65),
    *,
    seqlen_q: int = 1,
    num_heads_q: int = 16,
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    softmax_scale: float | None = None,
    poison: float = float("nan"),
    table_tail: int = TABLE_TAIL,
    spare_columns: int = 1,
    spare_pages: int = 2,
    strided_q: bool = False,
    padded_rows: bool = False,
    padded_pages: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DecodeInputs:
    """Make the inputs of a decode call over shuffled pages, the same for the same ``seed``.

    Queries and the keys inside the lengths are normally distributed. Everything else that the
    tensors span holds ``poison``: slots past the lengths, unused pages, gaps between rows and
    pages, and what lies between strided queries.

    Args:
        cache_seqlens: tokens of each sequence, S included; 0 is a padded row.
        seqlen_q: S.
        num_heads_q: H.
        latent_dim: V.
        rope_dim: D - V.
        page_size: P.
        dtype: of queries and cache.
        softmax_scale: None means ``D ** -0.5``, which keeps the logits of order 1.
        poison: NaN, infinity, or a number to see what a read would do.
        table_tail: the entries of ``block_table`` past the pages of each sequence.
        spare_columns: columns that no sequence uses.
        spare_pages: pages that no sequence uses.
        strided_q: lay ``q`` out as [B, H, S, D + gap].
        padded_rows: leave a gap after every row of the cache.
        padded_pages: leave a gap after every page of the cache.
        seed: of the random numbers and of the order of the pages.
        device: where the tensors lie.

    Returns:
        DecodeInputs: to be passed on as ``mla_decode(*inputs[:4], softmax_scale=...)``.
    """
    generator = torch.Generator().manual_seed(seed)
    head_dim = latent_dim + rope_dim
    used = [ceil_div(length, page_size) for length in cache_seqlens]
    pages = torch.randperm(sum(used) + spare_pages, generator=generator, dtype=torch.int32)
    block_table = torch.full(
        (len(used), max(used, default=0) + spare_columns), table_tail, dtype=torch.int32
    )
    kv_cache = _pool(len(pages), page_size, head_dim, dtype, poison, padded_rows, padded_pages)
    taken = 0
    for row, (length, count) in enumerate(zip(cache_seqlens, used, strict=True)):
        own = pages[taken : taken + count]
        block_table[row, :count] = own
        position = torch.arange(length)
        keys = _normal((length, head_dim), dtype, generator)
        kv_cache[own[position // page_size].long(), position % page_size, 0] = keys
        taken += count
    q = _queries((len(used), seqlen_q, num_heads_q, head_dim), dtype, poison, strided_q)
    q.copy_(_normal(tuple(q.shape), dtype, generator))
    return DecodeInputs(
        q=_move(q, device),
        kv_cache=_move(kv_cache, device),
        block_table=_move(block_table, device),
        cache_seqlens=torch.tensor(cache_seqlens, dtype=torch.int32, device=device),
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        head_dim_v=latent_dim,
    )


def _pool(
    pages: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    poison: float,
    padded_rows: bool,
    padded_pages: bool,
) -> Tensor:
    row = head_dim + _GAP * padded_rows
    page = page_size * row + _GAP * padded_pages
    memory = torch.full((pages * page,), poison, dtype=dtype)
    return memory.as_strided((pages, page_size, 1, head_dim), (page, row, row, 1))


def _queries(shape: tuple[int, ...], dtype: torch.dtype, poison: float, strided: bool) -> Tensor:
    if not strided:
        return torch.empty(shape, dtype=dtype)
    batch, seqlen_q, heads, head_dim = shape
    memory = torch.full((batch, heads, seqlen_q, head_dim + _GAP), poison, dtype=dtype)
    return memory[..., :head_dim].transpose(1, 2)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def _move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move the whole memory of a tensor, so that strides and gaps stay as they are."""
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
