"""Every shape formula of mla_ops, once: fakes, kernels, caches and tests read them here."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = [
    "DecodeShape",
    "ceil_div",
    "has_packed_rows",
    "lse_strides",
    "num_sm_parts",
    "packed_extent",
]

# Tokens of one KV block of the tile scheduler, and query rows of one FlashMLA tile.
# Source: FlashMLA's SM90 dense kernel (BLOCK_SIZE_M = 64, PAGE_BLOCK_SIZE = 64).
BLOCK_TOKENS = 64
TILE_ROWS = 64
# int32 fields of one row of tile_scheduler_metadata.
METADATA_FIELDS = 8
# begin_req of a part without work: idle for every batch size, unlike FlashMLA's own sentinel B.
IDLE_REQUEST = 2147483647
# Fixed cost of one split in blocks, as FlashMLA's scheduler assumes for its dense kernel.
SPLIT_OVERHEAD_BLOCKS = 5
# The balanced schedule: one more split of the longest request costs FlashMLA's combine step an
# eighth of what one more block a part costs its main kernel, so that ceil(blocks / quota) splits
# are cheapest at quota = sqrt(blocks / 8). Source: scripts/bench_schedule.py, fitted to the times
# of scripts/results/schedule_h200.json.
BALANCED_SPLITS_PER_BLOCK = 8
# The (latent, rope) pairs that published models use.
LATENT_ROPE_PAIRS = ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32))
MAX_HEADS = 128
MAX_SEQLEN_Q = 8


class DecodeShape(NamedTuple):
    """What a backend may look at to accept a decode call: never values, never batch content."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    batch_size: int
    seqlen_q: int
    num_heads_q: int
    head_dim: int
    head_dim_v: int
    num_pages: int
    page_size: int
    max_pages: int
    page_stride: int
    row_stride: int
    # kv_cache begins at a multiple of 16 bytes, as TMA wants it; unknown, so True, in a trace.
    aligned_cache: bool = True
    # dtype of the caller's out; None where the call returns one, in the dtype of q.
    out_dtype: torch.dtype | None = None
    # Elements from the first row of a sequence to its last one, in q or in the caller's outputs.
    sequence_span: int = 0


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide rounding up; works on symbolic sizes."""
    return (numerator + denominator - 1) // denominator


def num_sm_parts(
    multiprocessors: int,
    *,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int = 1,
    sparse: bool = False,
    fp8: bool = False,
) -> int:
    """Return T, the parts FlashMLA's SM90 kernels split the work into; 0 means unschedulable.

    Source: FlashMLA's ``get_mla_metadata`` (integer divisions throughout).
    """
    if sparse:
        return max(multiprocessors // seqlen_q // ceil_div(num_heads_q, TILE_ROWS), 1)
    tiles = ceil_div(seqlen_q * (num_heads_q // num_heads_k), TILE_ROWS)
    parts = multiprocessors // num_heads_k // tiles
    return parts if fp8 else max(parts, 1)


def lse_strides(seqlen_q: int, num_heads_q: int) -> tuple[int, int, int]:
    """Return the strides of lse [B, H, S]: the view of contiguous [B, S, H] memory."""
    return (seqlen_q * num_heads_q, 1, num_heads_q)


def packed_extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie between the first and the last one of ``tensor``, inclusive."""
    extent = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (size - 1) * stride
    return extent


def has_packed_rows(tensor: torch.Tensor) -> bool:
    """Tell whether the last stride is 1, or has no meaning because there is nothing to step over.

    ``contiguous()`` leaves the strides of such a tensor as they are.
    """
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or tensor.numel() == 0
