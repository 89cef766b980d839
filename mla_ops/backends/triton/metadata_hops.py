"""Where the grid moves, for all requests at once: by doubling, where snaps are many.

See ``metadata.py`` for the grid and its snaps. A part that begins with a request fixes the grid up
to the next snap: each request then has one successor, where a part begins behind the grid's next
move. Successors of successors, doubled, lead from the first request to every other in as many
steps as a batch has bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["RESIDUES", "hops_of", "walk"]

# Residues are packed as bytes.
RESIDUES = tl.constexpr(256)


@triton.jit
def hops_of(residue, quota, index, batch, OVERHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Return each request's successor, as ``request + BLOCK * distance``; itself if it has none.

    Args:
        residue: where requests begin on the line, modulo the quota.
        quota: blocks of a part, below RESIDUES.
        index: 0, 1, ... BLOCK - 1.
        batch: requests; beyond them nothing is read.
        OVERHEAD: how far behind the grid a boundary moves it.
        BLOCK: requests of the kernel, a power of 2.
    """
    # Four requests to a word, or each of them costs a pass through shared memory.
    pair = residue | (tl.gather(residue, tl.minimum(index + 1, BLOCK - 1), 0) << 8)
    four = pair | (tl.gather(pair, tl.minimum(index + 2, BLOCK - 1), 0) << 16)
    found = index
    waits = (index + 1 < batch).to(tl.int32)
    step = 1
    while tl.max(waits, 0) != 0:
        word = tl.gather(four, tl.minimum(index + step, BLOCK - 1), 0)
        for place in tl.static_range(4):
            request = index + step + place
            waits = tl.where(request < batch, waits, 0)
            distance = ((word >> (8 * place)) & 255) - residue
            distance = tl.where(distance < 0, distance + quota, distance)
            snaps = (waits != 0) & ((distance - 1).to(tl.uint32) < OVERHEAD)
            found = tl.where(snaps, request + BLOCK * distance, found)
            waits = tl.where(snaps, 0, waits)
        step += 4
    return found


@triton.jit
def walk(hops, limit, BLOCK: tl.constexpr, LEVEL: tl.constexpr):
    """Walk from request 0 to the last successor up to ``limit``.

    Args:
        hops: a request some hops on from each, and how far the grid has moved in between.
        limit: where to stop, any number of requests.
        BLOCK: requests of the kernel, a power of 2.
        LEVEL: doublings left to reach the end from anywhere.

    Returns:
        Tensor: ``request + BLOCK * shift``.
    """
    at = limit * 0
    if LEVEL > 0:
        target = hops % BLOCK
        twice = tl.gather(hops, target, 0) + (hops - target)
        at = walk(twice, limit, BLOCK, LEVEL - 1)
    here = at % BLOCK
    following = tl.gather(hops, here, 0)
    return tl.where(following % BLOCK <= limit, following + (at - here), at)
