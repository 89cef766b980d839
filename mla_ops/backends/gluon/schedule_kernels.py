# mypy: disable-error-code="no-untyped-def,misc"
"""How the decode and the combine kernel split the KV tiles over workers, planned on the device.

The sequences lie on a line of 64-token tiles and worker w of a row group takes the tiles
[w * quota, (w + 1) * quota). Two layouts of the line:

- aligned: every sequence is padded to a multiple of the quota, so that a worker has one sequence
  and writes at most one partial result. Taken when the workers suffice at a quota of at most 5/4
  of the even share, which costs nothing while memory is the limit;
- packed: no padding; a worker's share may end one sequence and begin others. Its first segment
  goes to partial slot 0, a later incomplete one to slot 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)
_NEVER = gl.constexpr(2**30)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def gdc_wait():
    """Wait until the kernels this one was launched early on are complete and visible."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def gdc_launch_dependents():
    """Allow the next kernel of the stream to start early."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def linger():
    """Keep a block without work on its SM for about 2 us (PTX: up to 4).

    The combine kernel's blocks go where most room is: an SM left empty would get more of them than
    the others, and end last (decode.py says what that costs).
    """
    gl.inline_asm_elementwise(
        "nanosleep.u32 2000; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_length(cache_seqlens_ptr, index, capacity):
    """Load a sequence's length, clamped to what its block table has room for."""
    return gl.minimum(gl.maximum(gl.load(cache_seqlens_ptr + index), 0), capacity)


@gluon.jit
def tiles_of(length):
    """Count the tiles of a sequence; an empty one owns a tile so that its output is written."""
    return gl.maximum((length + (TILE - 1)) // TILE, 1)


@gluon.jit
def _parts_of(tiles, quota):
    """Divide rounding up, in a fifth of the time of an integer division.

    Exact for quotients below 2**20, as the number of workers is: the float quotient is then off
    by one at most.
    """
    parts = (tiles.to(gl.float32) / quota.to(gl.float32)).to(gl.int32)
    rest = tiles - parts * quota
    return parts + (rest > 0).to(gl.int32) + (rest > quota).to(gl.int32) - (rest <= -quota)


@gluon.jit
def _share_of(tiles, workers):
    """Return how many tiles a worker takes, one 2**18th more where the quotient is inexact."""
    share = _parts_of(tiles, workers + tiles * 0)
    return share + (share >> 18)


@gluon.jit
def query_of(row, num_heads_q):
    """Divide a row, below 2**16, by the number of heads."""
    return ((row.to(gl.float32) + 0.5) / (num_heads_q + row * 0).to(gl.float32)).to(gl.int32)


@gluon.jit
def _plan_line(cache_seqlens_ptr, batch, capacity, workers, BP: gl.constexpr, NW: gl.constexpr):
    # [BP, 4]: sequences by candidate quotas.
    grid: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [NW, 1], [1, 0])
    index = gl.arange(0, BP, layout=gl.SliceLayout(1, grid))
    inside = index < batch
    length = gl.load(cache_seqlens_ptr + index, mask=inside, other=0)
    length = gl.minimum(gl.maximum(length, 0), capacity)
    tiles = gl.where(inside, tiles_of(length), 0)
    share = _share_of(gl.sum(tiles, 0), workers)
    quotas = share + share * gl.arange(0, 4, layout=gl.SliceLayout(0, grid)) // 12
    needed = gl.sum(_parts_of(tiles[:, None], quotas[None, :]), 0)
    best = gl.min(gl.where(needed <= workers, quotas, _NEVER), 0)
    aligned = best < _NEVER
    quota = gl.where(aligned, best, share)
    line = gl.where(aligned, _parts_of(tiles, quota) * quota, tiles)
    return index, tiles, line, quota, aligned


@gluon.jit
def plan_worker(
    cache_seqlens_ptr, batch, capacity, worker, workers, BP: gl.constexpr, NW: gl.constexpr
):
    """Return a worker's first sequence, the tile in it to begin at, and its number of tiles."""
    if BP == 1:
        b = batch - 1
        tiles = tiles_of(load_length(cache_seqlens_ptr, b, capacity))
        quota = _share_of(tiles, workers)
        tile = worker * quota
        count = gl.minimum(quota, tiles - tile)
    else:
        index, tiles, line, quota, aligned = _plan_line(
            cache_seqlens_ptr, batch, capacity, workers, BP, NW
        )
        begin = worker * quota
        # Scans lower from plain layouts only.
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
        ends = gl.associative_scan(gl.convert_layout(line, flat), 0, _add)
        passed = (ends <= begin) & (gl.arange(0, BP, layout=flat) < batch)
        b = gl.sum(passed.to(gl.int32), 0)
        tile = begin - gl.max(gl.where(passed, ends, 0), 0)
        own = gl.sum(gl.where(index == b, tiles, 0), 0)
        rest = gl.where(aligned, own - tile, gl.sum(tiles, 0) - begin)
        count = gl.where(b < batch, gl.minimum(quota, rest), 0)
    return b, tile, count


@gluon.jit
def plan_sequence(
    cache_seqlens_ptr, batch, capacity, b, workers, BP: gl.constexpr, NW: gl.constexpr
):
    """Return a sequence's first worker, its number of workers, and that first worker's slot."""
    if BP == 1:
        tiles = tiles_of(load_length(cache_seqlens_ptr, b, capacity))
        quota = _share_of(tiles, workers)
        first = b * 0
        parts = _parts_of(tiles, quota)
        slot = b * 0
    else:
        index, tiles, line, quota, _ = _plan_line(
            cache_seqlens_ptr, batch, capacity, workers, BP, NW
        )
        begin = gl.sum(gl.where(index < b, line, 0), 0)
        own = gl.sum(gl.where(index == b, tiles, 0), 0)
        first = begin // quota
        parts = (begin + own - 1) // quota - first + 1
        slot = (first * quota < begin).to(gl.int32)
    return first, parts, slot
