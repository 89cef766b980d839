"""The tile scheduler as one parallel kernel: no allocation, no sync, in place.

The requests lie on a line, request r at P[r] and blocks[r] + overhead long; with a quota of q
blocks, a part that begins at X ends at X + q, or at the one request boundary in
[X + q, X + q + overhead] if there is one. So a step needs a bit per position of that window, and
since the windows of the next steps overlap only by what snapping can add, six steps share one
round of reductions: the walk over 132 parts is 22 rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_ops.backends.triton.launch import on_device_of
from mla_ops.shapes import BALANCED_SPLITS_PER_BLOCK, BLOCK_TOKENS, IDLE_REQUEST, ceil_div

__all__ = ["mla_metadata_out"]

_BALANCED = tl.constexpr(BALANCED_SPLITS_PER_BLOCK)
_TOKENS = tl.constexpr(BLOCK_TOKENS)
_IDLE = tl.constexpr(IDLE_REQUEST)
_BEYOND = tl.constexpr(2**30)
_ROWS, _REQUESTS = 8, 32


@triton.jit
def _length(lengths_ptr, topk, index, mask, CONSTANT: tl.constexpr):
    if CONSTANT:
        return tl.where(mask, topk, 0)
    return tl.maximum(tl.load(lengths_ptr + index, mask=mask, other=0), 0)


@triton.jit
def _blocks(length):
    return tl.maximum(length - 1, 0) // _TOKENS + 1


@triton.jit
def _quota(total, longest, parts, BALANCE: tl.constexpr):
    quota = (total + parts - 1) // parts
    if BALANCE:
        square = longest // _BALANCED
        root = tl.sqrt(square.to(tl.float32)).to(tl.int32)
        root = tl.where(root * root > square, root - 1, root)
        root = tl.where((root + 1) * (root + 1) <= square, root + 1, root)
        quota = tl.maximum(quota, root)
    return quota


@triton.jit(do_not_specialize=["batch", "parts", "topk"])
def _mla_metadata_kernel(
    lengths_ptr,
    rows_ptr,
    splits_ptr,
    batch,
    parts,
    topk,
    CONSTANT: tl.constexpr,
    BALANCE: tl.constexpr,
    OVERHEAD: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    pid = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < batch
    blocks = _blocks(_length(lengths_ptr, topk, index, inside, CONSTANT))
    cost = tl.where(inside, blocks + OVERHEAD, 0)
    ends = tl.where(inside, tl.cumsum(cost, 0), _BEYOND)  # P[1:]
    total = tl.sum(cost, 0)
    longest = tl.max(tl.where(inside, blocks, 0), 0)
    quota = _quota(total, longest, parts, BALANCE)

    row = pid * ROWS + tl.arange(0, ROWS)
    begin = tl.where(row == 0, 0, total)
    end = tl.zeros([ROWS], tl.int32) + total
    request = pid * REQUESTS + tl.arange(0, REQUESTS)
    mine = request < batch
    own = tl.where(
        mine, _blocks(_length(lengths_ptr, topk, request, mine, CONSTANT)) + OVERHEAD, 0
    )
    own_end = tl.sum(tl.where(index < pid * REQUESTS, cost, 0), 0) + tl.cumsum(own, 0)
    own_start = own_end - own
    last_part = tl.zeros([REQUESTS], tl.int32)
    snapped = tl.zeros([REQUESTS], tl.int32)

    part = 0
    x = total * 0
    while x < total:
        base = x
        shift = total * 0
        for step in tl.static_range(1, STEPS + 1):
            distance = ends - (base + step * quota)
            bit = (distance >= 0) & (distance <= step * OVERHEAD)
            window = tl.sum(tl.where(bit, 1 << (distance & 31), 0), 0)
            # Boundaries lie more than `overhead` apart: at most one bit of a part's own window.
            window = (window >> shift) & ((1 << (OVERHEAD + 1)) - 1)
            # The position of the bit is its exponent as a float; no bit and bit 0 add nothing.
            exponent = (window.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            shift += tl.maximum(exponent, 0)
            x = tl.minimum(base + step * quota + shift, total)
            begin = tl.where(row == part + step, x, begin)
            end = tl.where(row + 1 == part + step, x, end)
            last_part += (x < own_end).to(tl.int32)
            snapped += ((window != 0) & (x <= own_start)).to(tl.int32)
        part += STEPS

    # Pairs of (part, request) up to a request: a part each, and one more for each boundary that
    # is no part's beginning.
    tl.store(splits_ptr + 1 + request, 1 + last_part + request - snapped, mask=mine)
    tl.store(splits_ptr + request, 0, mask=(request == 0))

    reached = ends[None, :] <= begin[:, None]  # [ROWS, BLOCK]
    begin_req = tl.sum(reached.to(tl.int32), 1)
    begin_block = begin - tl.max(tl.where(reached, ends[None, :], 0), 1)
    reached = ends[None, :] <= end[:, None]
    end_req = tl.sum(reached.to(tl.int32), 1)
    end_block = end - tl.max(tl.where(reached, ends[None, :], 0), 1)

    busy = begin < end
    whole = end_block == 0
    end_req = tl.where(whole, end_req - 1, end_req)
    end_length = _length(lengths_ptr, topk, end_req, busy, CONSTANT)
    end_blocks = _blocks(end_length)
    end_block = tl.where(whole, tl.where(end_length == 0, 0, end_blocks), end_block)
    first = begin_block != 0
    last = (end_block != end_blocks) & (end_length != 0)
    single = begin_req == end_req
    split = (begin_block + quota - 1) // tl.maximum(quota, 1)

    written = row < parts
    field = rows_ptr + row * 8
    tl.store(field, tl.where(busy, begin_req, _IDLE), mask=written)
    tl.store(field + 1, tl.where(busy, end_req, 0), mask=written)
    tl.store(field + 2, tl.where(busy, begin_block, 0), mask=written)
    tl.store(field + 3, tl.where(busy, end_block, 0), mask=written)
    tl.store(field + 4, tl.where(busy, split, 0), mask=written)
    both = (first | last) & single
    tl.store(field + 5, (busy & (first | both)).to(tl.int32), mask=written)
    tl.store(field + 6, (busy & (last | both)).to(tl.int32), mask=written)
    tl.store(field + 7, row * 0, mask=written)


def mla_metadata_out(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    *,
    overhead: int,
    topk: int | None,
    topk_length: Tensor | None,
    schedule: str,
) -> None:
    """Plan the decode of every request over T parts in one launch."""
    parts, batch = tile_scheduler_metadata.shape[0], cache_seqlens.shape[0]
    block = max(triton.next_power_of_2(batch), 32)
    grid = (max(ceil_div(parts, _ROWS), ceil_div(batch, _REQUESTS)),)
    lengths = cache_seqlens if topk_length is None else topk_length
    with on_device_of(cache_seqlens):
        _mla_metadata_kernel[grid](
            lengths,
            tile_scheduler_metadata,
            num_splits,
            batch,
            parts,
            topk or 0,
            CONSTANT=topk is not None and topk_length is None,
            BALANCE=schedule == "balanced",
            OVERHEAD=overhead,
            # A window of step * overhead + 1 positions has to fit into 31 bits.
            STEPS=30 // overhead,
            BLOCK=block,
            ROWS=_ROWS,
            REQUESTS=_REQUESTS,
            num_warps=1 if block <= 512 else min(block // 512, 16),
        )
