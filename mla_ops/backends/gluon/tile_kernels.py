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
def _thread_zero():
    """Return a zero of which the compiler believes that it differs between threads."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 below; mov.u32 below, %lanemask_lt; mov.u32 $0, %lanemask_ge; "
        "and.b32 $0, $0, below; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_page(table_row_ptr, page, length, P: gl.constexpr):
    return gl.load(table_row_ptr + page, mask=page * P < length, other=-1)


@gluon.jit
def load_pages(table, b, tile, length, P: gl.constexpr):
    """Load the block table's entries for a tile (four, of which 64 / P count).

    In the loop nothing depends on them until a tile later: behind the copies in flight they take a
    while. What was known to be the same for all threads would go to a uniform register, which has
    to wait for it at once.
    """
    block_table_ptr, table_stride, _, _, _ = table
    # Neither is negative: a product of two words, without a sign to keep.
    row = (b + _thread_zero()).to(gl.uint32).to(gl.uint64)
    if table_stride.dtype == gl.int32:
        table_stride = table_stride.to(gl.uint32)
    table_row_ptr = block_table_ptr + row * table_stride
    if P >= TILE:
        page = _load_page(table_row_ptr, tile // (P // TILE), length, P)
        return page, page, page, page
    else:
        first = tile * (TILE // P)
        page0 = _load_page(table_row_ptr, first, length, P)
        page1 = _load_page(table_row_ptr, first + 1, length, P)
        page2 = page0
        page3 = page1
        if P == 16:
            page2 = _load_page(table_row_ptr, first + 2, length, P)
            page3 = _load_page(table_row_ptr, first + 3, length, P)
        return page0, page1, page2, page3


@gluon.jit
def _page_row(page, pool):
    num_pages, page_rows = pool
    present = (page >= 0) & (page < num_pages)
    return gl.where(present, page * page_rows, _ABSENT)


@gluon.jit
def tile_rows(pages, tile, pool, P: gl.constexpr):
    """Return the pool rows of a tile's boxes, absent ones < 0, and a bit for each absent one."""
    row0 = _page_row(pages[0], pool)
    absent = (row0 < 0).to(gl.int32)
    if P >= TILE:
        row0 = gl.where(row0 < 0, row0, row0 + tile % (P // TILE) * TILE)
        return (row0, row0, row0, row0), absent
    else:
        row1 = _page_row(pages[1], pool)
        absent += (row1 < 0).to(gl.int32) * 2
        row2 = row0
        row3 = row1
        if P == 16:
            row2 = _page_row(pages[2], pool)
            row3 = _page_row(pages[3], pool)
            absent += (row2 < 0).to(gl.int32) * 4 + (row3 < 0).to(gl.int32) * 8
        return (row0, row1, row2, row3), absent


@gluon.jit
def next_tile(table, cursor, BP: gl.constexpr, P: gl.constexpr):
    """Step to the next tile, into the next sequence at a sequence's end, and load its pages."""
    b, tile, length, tiles = cursor
    tile += 1
    if BP > 1:  # noqa: SIM102 (decided when the kernel is compiled)
        if tile == tiles:
            # Past the last sequence nothing is fetched: any length will do.
            _, _, cache_seqlens_ptr, batch, capacity = table
            b = gl.minimum(b + 1, batch - 1)
            tile = 0
            length = load_length(cache_seqlens_ptr, b, capacity)
            tiles = tiles_of(length)
    return (b, tile, length, tiles), load_pages(table, b, tile, length, P)


@gluon.jit
def look_ahead(table, pool, cursor, pages, BP: gl.constexpr, P: gl.constexpr):
    """Return where the cursor's tile lies, what of it is absent, and the tile behind it."""
    rows, absent = tile_rows(pages, cursor[1], pool, P)
    cursor, pages = next_tile(table, cursor, BP, P)
    return rows, absent, cursor, pages


@gluon.jit
def expect_tile(left_bar, right_bar, more, ROPE: gl.constexpr):
    """Announce the copies of a tile, if there is one; a barrier must come before they start."""
    mbarrier.expect(left_bar, TILE * HALF * 2, pred=more)
    mbarrier.expect(right_bar, TILE * (HALF + ROPE) * 2, pred=more)


@gluon.jit
def _fetch(kv, column, rows, bar, buffer, P: gl.constexpr):
    if P >= TILE:
        tma.async_copy_global_to_shared(kv, [rows[0], column], bar, buffer)
    else:
        tma.async_copy_global_to_shared(kv, [rows[0], column], bar, buffer.slice(0, P))
        tma.async_copy_global_to_shared(kv, [rows[1], column], bar, buffer.slice(P, P))
        if P == 16:
            tma.async_copy_global_to_shared(kv, [rows[2], column], bar, buffer.slice(32, P))
            tma.async_copy_global_to_shared(kv, [rows[3], column], bar, buffer.slice(48, P))


@gluon.jit
def fetch_left(kv_half, rows, left_bar, left, P: gl.constexpr):
    """Start the copy of a tile's first half."""
    _fetch(kv_half, 0, rows, left_bar, left, P)


@gluon.jit
def fetch_right(
    kv_half, kv_rope, rows, right_bar, right, rope, P: gl.constexpr, ROPE: gl.constexpr
):
    """Start the copy of a tile's second half and rope."""
    _fetch(kv_half, HALF, rows, right_bar, right, P)
    if ROPE > 0:
        _fetch(kv_rope, V, rows, right_bar, rope, P)


@gluon.jit
def fetch(
    kv_half,
    kv_rope,
    rows,
    left_bar,
    right_bar,
    left,
    right,
    rope,
    P: gl.constexpr,
    ROPE: gl.constexpr,
):
    """Start the copy of a whole tile."""
    fetch_left(kv_half, rows, left_bar, left, P)
    fetch_right(kv_half, kv_rope, rows, right_bar, right, rope, P, ROPE)


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
