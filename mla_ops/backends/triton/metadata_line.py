"""The line of requests that the scheduler divides: positions on it, and where parts begin.

See ``metadata.py`` for what the grid, its snaps and its runs are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_ops.shapes import BALANCED_SPLITS_PER_BLOCK, BLOCK_TOKENS

__all__ = [
    "DISTANCES",
    "NONE",
    "blocks_of",
    "cost_of",
    "length_of",
    "link",
    "moved_from",
    "next_snap",
    "pass_on",
    "place",
    "quota_of",
    "remainder",
]

_BALANCED = tl.constexpr(BALANCED_SPLITS_PER_BLOCK)
_TOKENS = tl.constexpr(BLOCK_TOKENS)
NONE = tl.constexpr(2**31 - 1)
# A snap is packed with its distance to the grid, up to the overhead, and whether it is passed on.
DISTANCES = tl.constexpr(8)


@triton.jit
def length_of(lengths_ptr, topk, index, mask, CONSTANT: tl.constexpr):
    """Load the lengths of requests, 0 where there is none."""
    if CONSTANT:
        return tl.where(mask, topk, 0)
    return tl.maximum(tl.load(lengths_ptr + index, mask=mask, other=0), 0)


@triton.jit
def blocks_of(length):
    """Count the blocks of a request: an empty one has one too."""
    return tl.maximum(length - 1, 0) // _TOKENS + 1


@triton.jit
def quota_of(total, longest, parts, BALANCE: tl.constexpr):
    """Return the blocks of a part, the overhead behind them left out."""
    quota = (total + parts - 1) // parts
    if BALANCE:
        square = longest // _BALANCED
        root = tl.sqrt(square.to(tl.float32)).to(tl.int32)
        root = tl.where(root * root > square, root - 1, root)
        root = tl.where((root + 1) * (root + 1) <= square, root + 1, root)
        quota = tl.maximum(quota, root)
    return tl.maximum(quota, 1)


@triton.jit
def remainder(value, divisor, reciprocal):
    """Return ``value % divisor``, unsigned."""
    # A multiplication by floor((2**32 - 1) / divisor) is one quotient short at most.
    value = value.to(tl.uint32)
    rest = value - tl.umulhi(value, reciprocal) * divisor
    return tl.minimum(rest, rest - divisor)


@triton.jit
def cost_of(blocks, inside, quota, reciprocal, OVERHEAD: tl.constexpr):
    """Return how long requests are on the line."""
    # A quota within the overhead reaches every boundary: each request then costs whole parts.
    rest = remainder(blocks, quota.to(tl.uint32), reciprocal).to(tl.int32)
    whole = blocks + tl.where(rest > 0, quota - rest, 0)
    return tl.where(inside, tl.where(quota <= OVERHEAD, whole, blocks + OVERHEAD), 0)


@triton.jit
def link(cost, inside, quota, reciprocal, OVERHEAD: tl.constexpr):
    """Tell which requests end a run, and by how much the others move the grid."""
    rest = remainder(cost, quota, reciprocal)
    stops = (rest > OVERHEAD) | (inside == 0)
    return stops.to(tl.int32), tl.where(stops, 0, rest.to(tl.int32))


@triton.jit
def next_snap(ends, rest, follows, OVERHEAD: tl.constexpr, LINKS: tl.constexpr):
    """Return the first boundary that moves the grid, packed, or NONE."""
    snaps = (rest - 1) < OVERHEAD  # unsigned: 0 is out
    packed = ends * (DISTANCES * LINKS) + rest.to(tl.int32) * LINKS + follows
    return tl.min(tl.where(snaps, packed, NONE), 0)


@triton.jit
def pass_on(position, ends, stops, gain, moved, own_end, own_stops, own_gain, own_moved, shift):
    """Move the grid along the run of requests that begins behind a snap."""
    here = ends == position
    run = tl.max(tl.where(here, stops, 0), 0)
    gone = tl.max(tl.where(here, gain, 0), 0)
    here = (ends >= position) & (stops == run)
    end = tl.max(tl.where(here, gain, 0), 0) - gone
    moved += tl.where(ends >= position, tl.where(here, gain - gone, end), 0)
    here = (own_end >= position) & (own_stops == run)
    own_moved += tl.where(own_end >= position, tl.where(here, own_gain - gone, end), 0)
    return moved, own_moved, shift + end


@triton.jit
def place(position, ends, batch):
    """Return the request at each position of the line, and the blocks in front of it there."""
    reached = ends[None, :] <= position[:, None]  # [ROWS, BLOCK]
    request = tl.minimum(tl.sum(reached.to(tl.int32), 1), batch)
    return request, position - tl.max(tl.where(reached, ends[None, :], 0), 1)


@triton.jit
def moved_from(position, ends, moved):
    """Move a position of the grid as far as the boundaries before it did."""
    reached = (ends - moved)[None, :] <= position[:, None]  # [ROWS, BLOCK]
    return position + tl.max(tl.where(reached, moved[None, :], 0), 1)
