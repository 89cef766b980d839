# mypy: disable-error-code="no-untyped-def,misc"
"""Query rows on their way in, and the statistics of rows on their way out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from mla_ops.backends.gluon.schedule_kernels import query_of
from mla_ops.backends.gluon.tile_kernels import HALF, V

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
# Arguments of any value: the caller's outputs have any strides.
OUTPUT_STRIDES = [f"out_stride_{name}" for name in "bsh"] + [f"lse_stride_{n}" for n in "bhs"]
# Slices of buffers begin anywhere; none of these is read or written in wide words.
UNALIGNED = ["cache_seqlens_ptr", "sink_ptr", "out_ptr", "lse_ptr"]


@gluon.jit
def stage_queries(queries, group, num_heads_q, N: gl.constexpr, NW: gl.constexpr):
    """Write the query of each row of a group to shared memory: a thread divides for one row."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    queries.store(query_of(group * N + gl.arange(0, N, layout=flat), num_heads_q))


@gluon.jit
def _load_q(q_row_ptr, offset, live, column, W: gl.constexpr, layout: gl.constexpr):
    at = column + gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    return gl.load(q_row_ptr + offset[:, None] + at[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def store_scale(m, total, sink_ptr, head, live, SINK: gl.constexpr):
    """Return the factor of the accumulator and the lse of rows with maximum m and sum total."""
    lse2 = m + libdevice.fast_log2f(total)
    share = libdevice.fast_dividef(1.0, total)
    if SINK:
        sink2 = gl.load(sink_ptr + head, mask=live, other=0.0) * LOG2E
        share = share / (1.0 + gl.exp2(sink2 - lse2))
    empty = total == 0
    return gl.where(empty, 0.0, share), gl.where(empty, -float("inf"), lse2 * LN2)


@gluon.jit
def load_q(
    q_ptr,
    b,
    group,
    queries,
    num_rows,
    num_heads_q,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    N: gl.constexpr,
    ROPE: gl.constexpr,
    NW: gl.constexpr,
):
    """Load a row group of q: both halves and the rope; rows that do not exist are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    q_row_ptr = q_ptr + b.to(gl.int64) * q_stride_b
    row = group * N + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    query = queries.load(gl.SliceLayout(1, layout))
    offset = query * q_stride_s + (row - query * num_heads_q) * q_stride_h
    q_left = _load_q(q_row_ptr, offset, row < num_rows, 0, HALF, layout)
    q_right = _load_q(q_row_ptr, offset, row < num_rows, HALF, HALF, layout)
    q_tail = q_right
    if ROPE > 0:
        tail: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
        row = group * N + gl.arange(0, N, layout=gl.SliceLayout(1, tail))
        query = queries.load(gl.SliceLayout(1, tail))
        offset = query * q_stride_s + (row - query * num_heads_q) * q_stride_h
        q_tail = _load_q(q_row_ptr, offset, row < num_rows, V, ROPE, tail)
    return q_left, q_right, q_tail


@gluon.jit
def stage_q(left, right, tail, q_left, q_right, q_tail, ROPE: gl.constexpr):
    """Write what ``load_q`` loaded to shared memory, where the products read it."""
    q_left.index(0).store(left)
    q_right.index(0).store(right)
    if ROPE > 0:
        q_tail.index(0).store(tail)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_result(
    acc_left,
    acc_right,
    m,
    total,
    sink_ptr,
    out_ptr,
    lse_ptr,
    queries,
    b,
    rg,
    late,
    num_rows,
    num_heads_q,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    out_stride_v,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
    N: gl.constexpr,
    SINK: gl.constexpr,
    accum: gl.constexpr,
    score_row: gl.constexpr,
):
    """Write out and lse of a sequence that one worker saw whole.

    ``late`` is a zero that is known only here: what it is added to is computed now, and not
    before the loop over tiles and kept in registers for this end of it.
    """
    accum_row: gl.constexpr = gl.SliceLayout(0, accum)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    group = rg + late
    out_stride_b += late
    out_stride_s += late
    out_stride_h += late
    out_stride_v += late
    lse_stride_b += late
    at = group * N + gl.arange(0, N, layout=score_row)
    live = at < num_rows
    query = queries.load(score_row)
    head = at - query * num_heads_q
    factor, lse = store_scale(m, total, sink_ptr, head, live, SINK)
    lse_at = b.to(gl.int64) * lse_stride_b
    lse_at += query * lse_stride_s + head * lse_stride_h
    gl.store(lse_ptr + lse_at, lse, mask=live)
    factor = gl.convert_layout(factor, accum_row)
    at = group * N + gl.arange(0, N, layout=accum_row)
    live = (at < num_rows)[None, :]
    query = queries.load(accum_row)
    out_at = b.to(gl.int64) * out_stride_b
    out_at += query * out_stride_s + (at - query * num_heads_q) * out_stride_h
    v = gl.arange(0, HALF, layout=gl.SliceLayout(1, accum))
    target = out_ptr + out_at[None, :] + (v * out_stride_v)[:, None]
    gl.store(target, (acc_left * factor[None, :]).to(dtype), mask=live)
    target += HALF * out_stride_v
    gl.store(target, (acc_right * factor[None, :]).to(dtype), mask=live)


@gluon.jit
def _store_wide(acc, buffer, half_ptr, N: gl.constexpr, NW: gl.constexpr):
    """Write a half of a partial result of 16 bits, 16 bytes a thread."""
    dtype: gl.constexpr = half_ptr.dtype.element_ty
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [1, NW, 1], [2, 1, 0])
    staged = buffer.index(0)._reinterpret(dtype, [N // 8, HALF, 8], flat)
    staged.store(acc.to(dtype).reshape((HALF, N // 8, 8)).permute((1, 0, 2)))
    gl.thread_barrier()
    block = gl.arange(0, N // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    v = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, wide)))
    at = (block * (V * 8))[:, None, None] + (v * 8)[None, :, None] + lane[None, None, :]
    gl.store(half_ptr + at, staged.load(wide))


@gluon.jit
def store_partial(
    acc_left,
    acc_right,
    m,
    total,
    q_left,
    q_right,
    part_out_ptr,
    part_lse_ptr,
    slot,
    N: gl.constexpr,
    NW: gl.constexpr,
    accum: gl.constexpr,
    score_row: gl.constexpr,
):
    """Write one of a sequence's partial results.

    They lie as [slot, N / 8, 512, 8], in the order in which a warp holds them, and normalised, so
    that they fit the dtype of out. Those of 16 bits go by way of Q's buffers, of which nothing is
    read any more: a quarter of the stores.
    """
    dtype: gl.constexpr = part_out_ptr.dtype.element_ty
    accum_row: gl.constexpr = gl.SliceLayout(0, accum)
    empty = total == 0
    share = gl.where(empty, 0.0, libdevice.fast_dividef(1.0, total))
    share = gl.convert_layout(share, accum_row)
    partial = part_out_ptr + slot * (N * V)
    if dtype.primitive_bitwidth == 16:
        _store_wide(acc_left * share[None, :], q_left, partial, N, NW)
        _store_wide(acc_right * share[None, :], q_right, partial + HALF * 8, N, NW)
    else:
        row = gl.arange(0, N, layout=accum_row)
        v = gl.arange(0, HALF, layout=gl.SliceLayout(1, accum))
        partial += (row // 8 * (V * 8) + row % 8)[None, :] + (v * 8)[:, None]
        gl.store(partial, acc_left * share[None, :])
        gl.store(partial + HALF * 8, acc_right * share[None, :])
    lse2 = gl.where(empty, -float("inf"), m + libdevice.fast_log2f(total))
    gl.store(part_lse_ptr + slot * N + gl.arange(0, N, layout=score_row), lse2)
