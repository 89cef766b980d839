"""The tile scheduler as one parallel kernel: no allocation, no sync, in place.

The requests lie on a line, request r at P[r] and blocks[r] + overhead long. With a quota of q
blocks, a part that begins at X ends at X + q, unless a request boundary lies at most ``overhead``
behind that: then it ends there. So part p begins at p * q + shift, and only a boundary whose
distance to that grid is 1..overhead moves the grid, a snap. The walk jumps from one snap to the
next, one minimum over all requests each; most batches have a few, none has more than
min(B, T). Where requests are about as long as whole parts, as in a batch of equal lengths, each
moves the grid: such runs are one step. Where a part has few blocks nearly every one ends in a
snap: then all of them are found at once (metadata_hops.py). Every program walks the whole line
and writes a few rows and requests of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_ops._torch import on_device_of
from mla_ops.backends.triton.launch import INTERPRETED
from mla_ops.backends.triton.metadata_hops import RESIDUES, hops_of, walk
from mla_ops.backends.triton.metadata_line import (
    DISTANCES,
    NONE,
    blocks_of,
    cost_of,
    length_of,
    link,
    moved_from,
    next_snap,
    pass_on,
    place,
    quota_of,
    remainder,
)
from mla_ops.shapes import IDLE_REQUEST, ceil_div

__all__ = ["mla_metadata_out"]

_SCHEDULES = ("flash_mla", "balanced")
_IDLE = tl.constexpr(IDLE_REQUEST)
# Lengths of more blocks together than this (5 TB of bf16 cache) are garbage; they are cut, so
# that positions on the line, packed with a distance and a bit, stay below 2**31.
_MOST_BLOCKS = tl.constexpr(2**26)
# A wave of one-warp programs costs as much as one program: a row each. The interpreter runs them
# one after the other.
_ROWS = 16 if INTERPRETED else 1
# Runs, and the short cut for equal requests, cost four more registers a request.
_LARGEST_WITH_RUNS = 1024
# Below a quota of sqrt(_SHORT * batch) all snaps at once are found sooner than one by one.
# Source: variants timed on an H200, lengths of scripts/bench_metadata.py and up to 1500.
_SHORT = tl.constexpr(4)


# Longer than 50 lines: what the walk carries stays in registers only inside one function.
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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    LINKS: tl.constexpr,
    HOPS: tl.constexpr,
):
    tl.static_assert(OVERHEAD < DISTANCES)
    pid = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < batch
    request = pid * REQUESTS + tl.arange(0, REQUESTS)
    mine = request < batch
    blocks = blocks_of(length_of(lengths_ptr, topk, index, inside, CONSTANT))
    own = blocks_of(length_of(lengths_ptr, topk, request, mine, CONSTANT))

    # In units of 1024 blocks, because the sum of blocks itself may overflow.
    units = tl.sum(tl.where(inside, blocks >> 10, 0), 0)
    if LINKS == 1:
        units += tl.sum(tl.where(inside, blocks & 1023, 0), 0) >> 10
    crowded = units > (_MOST_BLOCKS >> 10)
    most = tl.where(crowded, _MOST_BLOCKS // BLOCK, _MOST_BLOCKS)
    blocks = tl.minimum(blocks, most)
    total = tl.sum(tl.where(inside, blocks + OVERHEAD, 0), 0)
    longest = tl.max(tl.where(inside, blocks, 0), 0)
    quota = quota_of(total, longest, parts, BALANCE)
    grid = quota.to(tl.uint32)
    reciprocal = 0xFFFFFFFF // grid
    cost = cost_of(blocks, inside, quota, reciprocal, OVERHEAD)
    ends = tl.cumsum(cost, 0)  # P[1:], P[B] behind the last request
    total = tl.sum(cost, 0)
    own_cost = cost_of(tl.minimum(own, most), mine, quota, reciprocal, OVERHEAD)
    before = index < pid * REQUESTS
    own_end = tl.sum(tl.where(before, cost, 0), 0) + tl.cumsum(own_cost, 0)

    # A request that ends at most the overhead behind whole parts of its own passes a beginning
    # on: where a part begins with it, one begins behind it.
    stops, gain, follows = index * 0, index * 0, index * 0
    own_stops, own_gain = request * 0, request * 0
    if LINKS == 2:
        stops, gain = link(cost, inside, grid, reciprocal, OVERHEAD)
        own_stops, own_gain = link(own_cost, mine, grid, reciprocal, OVERHEAD)
        own_stops = tl.sum(tl.where(before, stops, 0), 0) + tl.cumsum(own_stops, 0)
        own_gain = tl.sum(tl.where(before, gain, 0), 0) + tl.cumsum(own_gain, 0)
        stops = tl.cumsum(stops, 0)
        gain = tl.cumsum(gain, 0)
        inside_next = index + 1 < batch
        next_length = length_of(lengths_ptr, topk, index + 1, inside_next, CONSTANT)
        next_blocks = tl.minimum(blocks_of(next_length), most)
        next_cost = cost_of(next_blocks, inside_next, quota, reciprocal, OVERHEAD)
        next_stops, _ = link(next_cost, inside_next, grid, reciprocal, OVERHEAD)
        follows = 1 - next_stops

    moved = tl.zeros([BLOCK], tl.int32)  # how far the grid has moved at each boundary
    own_moved = tl.zeros([REQUESTS], tl.int32)
    shift = total * 0
    rest = remainder(ends, grid, reciprocal)  # distance behind the grid
    snap = next_snap(ends, rest, follows, OVERHEAD, LINKS)
    equal = tl.min(tl.where(inside, blocks, _MOST_BLOCKS), 0) == longest
    if (LINKS == 2) & equal & (snap != NONE):
        # Equal requests: every n-th boundary snaps, by the same distance.
        position = snap // (DISTANCES * LINKS)
        shift = snap // LINKS % DISTANCES
        every = position // (total // batch)
        moved = tl.minimum(index + 1, batch) // every * shift
        own_moved = (request + 1) // every * shift
        rest = remainder(ends - moved, grid, reciprocal)
        snap = total * 0 + NONE
    if HOPS > 0:
        # OVERHEAD of quota boundaries snap: many, and each of them soon after another.
        short = (quota < RESIDUES) & (quota * quota < _SHORT * batch)
        if (snap != NONE) & short:
            residue = remainder(ends - cost, grid, reciprocal).to(tl.int32)
            hops = hops_of(residue, quota, index, batch, OVERHEAD, BLOCK)
            moved = walk(hops, tl.minimum(index + 1, batch - 1), BLOCK, HOPS) // BLOCK
            rest = remainder(ends - moved, grid, reciprocal)
            # Behind the last request no part begins, but the grid moves to its end.
            closes = (index >= batch - 1) & ((rest - 1) < OVERHEAD)
            moved += tl.where(closes, rest.to(tl.int32), 0)
            rest = tl.where(closes, 0, rest)
            own_moved = tl.gather(moved, tl.minimum(request, BLOCK - 1), 0)
            snap = total * 0 + NONE
    while snap != NONE:
        position = snap // (DISTANCES * LINKS)
        distance = snap // LINKS % DISTANCES
        shift += distance
        # Boundaries before the snap keep their distance: 0 means that a part begins there.
        passed = ends >= position
        moved = tl.where(passed, shift, moved)
        own_moved = tl.where(own_end >= position, shift, own_moved)
        if LINKS == 2:
            nearer = rest - distance.to(tl.uint32)
            rest = tl.where(passed, tl.minimum(nearer, nearer + grid), rest)
            if snap % LINKS != 0:
                moved, own_moved, shift = pass_on(
                    *(position, ends, stops, gain, moved),
                    *(own_end, own_stops, own_gain, own_moved, shift),
                )
                rest = remainder(ends - moved, grid, reciprocal)
        else:
            # Kept up to date, it is spilled where requests are many.
            rest = remainder(ends - moved, grid, reciprocal)
        snap = next_snap(ends, rest, follows, OVERHEAD, LINKS)

    # Pairs of (part, request) up to a request: a part each, and one more for each boundary that
    # is no part's beginning.
    own_end -= own_moved
    last_part = (own_end - 1) // quota
    begins = ((last_part + 1) * quota == own_end).to(tl.int32)
    met = tl.sum(((rest == 0) & before).to(tl.int32), 0) + tl.cumsum(begins, 0) - begins
    tl.store(splits_ptr + 1 + request, 1 + last_part + request - met, mask=mine)
    tl.store(splits_ptr + request, 0, mask=request == 0)

    row = pid * ROWS + tl.arange(0, ROWS)
    begin = moved_from(tl.minimum(row, parts) * quota, ends, moved)
    end = moved_from(tl.minimum(row + 1, parts) * quota, ends, moved)
    begin = tl.minimum(begin, total)
    end = tl.minimum(end, total)
    busy = begin < end
    begin_req, begin_block = place(begin, ends, batch)
    end_req, end_block = place(end, ends, batch)
    whole = end_block == 0
    end_req = tl.where(whole, end_req - 1, end_req)
    end_length = length_of(lengths_ptr, topk, end_req, busy, CONSTANT)
    end_blocks = tl.minimum(blocks_of(end_length), most)
    end_block = tl.where(whole, tl.where(end_length == 0, 0, end_blocks), end_block)
    first = begin_block != 0
    last = (end_block != end_blocks) & (end_length != 0)
    either = (first | last) & (begin_req == end_req)
    split = (begin_block + quota - 1) // quota
    written = row < parts
    field = rows_ptr + row * 8
    tl.store(field, tl.where(busy, begin_req, _IDLE), mask=written)
    tl.store(field + 1, tl.where(busy, end_req, 0), mask=written)
    tl.store(field + 2, tl.where(busy, begin_block, 0), mask=written)
    tl.store(field + 3, tl.where(busy, end_block, 0), mask=written)
    tl.store(field + 4, tl.where(busy, split, 0), mask=written)
    tl.store(field + 5, (busy & (first | either)).to(tl.int32), mask=written)
    tl.store(field + 6, (busy & (last | either)).to(tl.int32), mask=written)
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
    """Plan the decode of every request over T parts in one launch.

    Raises:
        ValueError: ``schedule`` is neither "flash_mla" nor "balanced".
    """
    if schedule not in _SCHEDULES:
        raise ValueError(
            f"mla_metadata: schedule must be one of {_SCHEDULES}, got {schedule!r} "
            "(resolve 'auto' before the launch)"
        )
    parts, batch = tile_scheduler_metadata.shape[0], cache_seqlens.shape[0]
    block = max(triton.next_power_of_2(batch), 32)
    requests = max(block // 64, 32)
    grid = (max(ceil_div(parts, _ROWS), ceil_div(batch, requests)),)
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
            BLOCK=block,
            ROWS=_ROWS,
            REQUESTS=requests,
            LINKS=2 if block <= _LARGEST_WITH_RUNS else 1,
            HOPS=block.bit_length() - 1 if block <= _LARGEST_WITH_RUNS else 0,
            # One warp reduces without a barrier; several need fewer steps for all snaps at once.
            num_warps=1 if block < 128 else 4 if block < 512 else min(max(block // 512, 8), 16),
        )
