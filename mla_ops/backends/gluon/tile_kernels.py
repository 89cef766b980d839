# mypy: disable-error-code="no-untyped-def,misc"
"""How tiles of the paged cache come into shared memory: page lookups, TMA boxes, dead rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_ops.backends.gluon.schedule_kernels import TILE, load_length, tiles_of

V = gl.constexpr(512)
# The latent is held in two halves, each with its own barrier: the first half's products begin
# while the second is in flight, and its buffer is refilled while the second is being read.
HALF = gl.constexpr(256)
# A coordinate at which a whole box lies outside the pool: TMA fills it with zeros.
_ABSENT = gl.constexpr(-64)


@gluon.jit
def _page_rows(table_row_ptr, page, length, num_pages, page_rows, P: gl.constexpr):
    inside = page * P < length
    entry = gl.load(table_row_ptr + page, mask=inside, other=-1)
    present = (entry >= 0) & (entry < num_pages)
    return gl.where(present, entry * page_rows, _ABSENT)


@gluon.jit
def tile_rows(
    block_table_ptr, table_stride, b, tile, length, num_pages, page_rows, P: gl.constexpr
):
    """Return the pool rows of a tile's boxes (four, of which 64 / P count); absent ones < 0."""
    table_row_ptr = block_table_ptr + b.to(gl.int64) * table_stride
    if P >= TILE:
        PER: gl.constexpr = P // TILE
        row = _page_rows(table_row_ptr, tile // PER, length, num_pages, page_rows, P)
        row = gl.where(row < 0, row, row + tile % PER * TILE)
        return row, row, row, row
    else:
        PER: gl.constexpr = TILE // P
        page = tile * PER
        row0 = _page_rows(table_row_ptr, page, length, num_pages, page_rows, P)
        row1 = _page_rows(table_row_ptr, page + 1, length, num_pages, page_rows, P)
        row2 = row0
        row3 = row1
        if PER == 4:
            row2 = _page_rows(table_row_ptr, page + 2, length, num_pages, page_rows, P)
            row3 = _page_rows(table_row_ptr, page + 3, length, num_pages, page_rows, P)
        return row0, row1, row2, row3


@gluon.jit
def absent_bits(row0, row1, row2, row3, P: gl.constexpr):
    """Return a bit for each box of a tile that holds no page."""
    bits = (row0 < 0).to(gl.int32)
    if P < TILE:
        bits += (row1 < 0).to(gl.int32) * 2
        if P == 16:
            bits += (row2 < 0).to(gl.int32) * 4 + (row3 < 0).to(gl.int32) * 8
    return bits


@gluon.jit
def _fetch(kv, column, row0, row1, row2, row3, bar, buffer, P: gl.constexpr):
    if P >= TILE:
        tma.async_copy_global_to_shared(kv, [row0, column], bar, buffer)
    else:
        tma.async_copy_global_to_shared(kv, [row0, column], bar, buffer.slice(0, P))
        tma.async_copy_global_to_shared(kv, [row1, column], bar, buffer.slice(P, P))
        if P == 16:
            tma.async_copy_global_to_shared(kv, [row2, column], bar, buffer.slice(32, P))
            tma.async_copy_global_to_shared(kv, [row3, column], bar, buffer.slice(48, P))


@gluon.jit
def fetch_left(kv_half, row0, row1, row2, row3, left_bar, left, P: gl.constexpr):
    """Start the copy of a tile's first half."""
    mbarrier.expect(left_bar, TILE * HALF * 2)
    _fetch(kv_half, 0, row0, row1, row2, row3, left_bar, left, P)


@gluon.jit
def fetch_right(
    kv_half,
    kv_rope,
    row0,
    row1,
    row2,
    row3,
    right_bar,
    right,
    rope,
    P: gl.constexpr,
    ROPE: gl.constexpr,
):
    """Start the copy of a tile's second half and rope."""
    mbarrier.expect(right_bar, TILE * (HALF + ROPE) * 2)
    _fetch(kv_half, HALF, row0, row1, row2, row3, right_bar, right, P)
    if ROPE > 0:
        _fetch(kv_rope, V, row0, row1, row2, row3, right_bar, rope, P)


@gluon.jit
def next_tile(cache_seqlens_ptr, batch, capacity, b, tile, length, tiles):
    """Step to the next tile, into the next sequence at a sequence's end."""
    tile += 1
    if tile == tiles:
        # Past the last sequence nothing is fetched: any length will do.
        b = gl.minimum(b + 1, batch - 1)
        tile = 0
        length = load_length(cache_seqlens_ptr, b, capacity)
        tiles = tiles_of(length)
    return b, tile, length, tiles


@gluon.jit
def zero_rows(buffer, first, NW: gl.constexpr):
    """Zero the rows of a K half from ``first`` on, eight (one swizzle atom) at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    for group in gl.static_range(TILE // 8):
        if group * 8 + 8 > first:
            rows = buffer.slice(group * 8, 8)
            kept = (row + group * 8 < first)[:, None]
            rows.store(gl.where(kept, rows.load(layout), 0.0))
