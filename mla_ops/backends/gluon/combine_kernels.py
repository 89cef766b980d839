# mypy: disable-error-code="no-untyped-def,misc"
"""The combine kernel: merges a sequence's partial results of several workers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_ops.backends.gluon.row_kernels import OUTPUT_STRIDES, UNALIGNED, store_scale
from mla_ops.backends.gluon.schedule_kernels import (
    gdc_launch_dependents,
    gdc_wait,
    plan_sequence,
    query_of,
)
from mla_ops.backends.gluon.tile_kernels import V


@gluon.jit
def _combine_units(
    part_out_ptr,
    part_lse_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    first,
    parts,
    first_slot,
    rg,
    rank,
    num_heads_q,
    num_rows,
    out_stride_s,
    out_stride_h,
    out_stride_v,
    lse_stride_h,
    lse_stride_s,
    N: gl.constexpr,
    RG: gl.constexpr,
    SLOTS: gl.constexpr,
    SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    E: gl.constexpr,
    W: gl.constexpr,
    NW: gl.constexpr,
):
    """Merge units of eight rows by W columns; E partials at a time are held in registers.

    Of no parts and no rows it runs through without a load or a store.
    """
    # Two lanes of four rows, W columns, and what is left of the threads over the partials.
    along_v: gl.constexpr = 16 if W > 16 else W
    warps_v: gl.constexpr = W // along_v if W // along_v < NW else NW
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [16 // along_v, along_v, 2], [NW // warps_v, warps_v, 1], [2, 1, 0]
    )
    part_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))  # [E]
    plane: gl.constexpr = gl.SliceLayout(0, layout)  # [W, 8]
    plane_row: gl.constexpr = gl.SliceLayout(0, plane)
    # Every warp computes all weights, so that no reduction crosses warps; shared memory brings
    # them to the threads that need them.
    stat: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, NW], [1, 0])  # [E, 8]
    stat_part: gl.constexpr = gl.SliceLayout(1, stat)
    stat_row: gl.constexpr = gl.SliceLayout(0, stat)
    UNITS: gl.constexpr = N // 8 * (V // W)
    spread = gl.allocate_shared_memory(
        gl.float32, [E, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for unit in range(rank, UNITS, SPLIT):
        # Units of the same rows follow one another.
        row_block = unit // (V // W)
        column = unit % (V // W) * W
        lane = gl.arange(0, 8, layout=plane_row)
        v = gl.arange(0, W, layout=gl.SliceLayout(1, plane))
        # Pointers first, then constant offsets: a load each, without arithmetic of its own.
        base = ((first * RG + rg) * SLOTS).to(gl.int64) * N + row_block * 8
        block_lse_ptr = part_lse_ptr + base
        block_out_ptr = part_out_ptr + base * V + column * 8
        m = gl.full([8], -float("inf"), gl.float32, layout=stat_row)
        total = gl.zeros([8], gl.float32, layout=stat_row)
        acc = gl.zeros([W, 8], gl.float32, layout=plane)
        # Only part 0 may lie in a worker's second slot.
        second = first_slot
        for begin in range(0, gl.maximum(parts, 1), E):
            index = gl.arange(0, E, layout=part_layout)
            held = index < parts - begin
            plane_ptr = block_out_ptr + (v[:, None] * 8 + lane[None, :])[None, :, :]
            if SLOTS == 2:
                plane_ptr += (gl.where(index == 0, second, 0) * (N * V))[:, None, None]
            at = index * (RG * SLOTS * N * V)
            part_o = gl.load(plane_ptr + at[:, None, None], mask=held[:, None, None], other=0.0)
            index = gl.arange(0, E, layout=stat_part)
            held = index < parts - begin
            row_ptr = block_lse_ptr + gl.arange(0, 8, layout=stat_row)[None, :]
            if SLOTS == 2:
                row_ptr += (gl.where(index == 0, second, 0) * N)[:, None]
            at = index * (RG * SLOTS * N)
            part_lse = gl.load(row_ptr + at[:, None], mask=held[:, None], other=-float("inf"))
            second = 0
            block_out_ptr += E * RG * SLOTS * N * V
            block_lse_ptr += E * RG * SLOTS * N
            # Before the weights of the last pass are overwritten.
            gl.thread_barrier()
            m_new = gl.maximum(m, gl.max(part_lse, 0))
            m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
            weight = gl.exp2(part_lse - m_safe[None, :])
            decay = gl.exp2(m - m_safe)
            total = total * decay + gl.sum(weight, 0)
            spread.store(weight)
            gl.thread_barrier()
            weight = spread.load(gl.SliceLayout(1, layout))
            decay = gl.convert_layout(decay, plane_row)
            part_o = part_o.to(gl.float32)
            acc = acc * decay[None, :] + gl.sum(part_o * weight[:, None, :], 0)
            m = m_new
        row = rg * N + row_block * 8 + gl.arange(0, 8, layout=stat_row)
        live = row < num_rows
        query = query_of(row, num_heads_q)
        head = row - query * num_heads_q
        factor, lse = store_scale(m, total, sink_ptr, head, live, SINK)
        if unit % (V // W) == 0:
            lse_at = query * lse_stride_s + head * lse_stride_h
            gl.store(lse_ptr + lse_at, lse, mask=live)
        factor = gl.convert_layout(factor, plane_row)
        row = rg * N + row_block * 8 + lane
        query = query_of(row, num_heads_q)
        out_at = query * out_stride_s + (row - query * num_heads_q) * out_stride_h
        target = out_ptr + out_at[None, :] + ((column + v) * out_stride_v)[:, None]
        result = (acc * factor[None, :]).to(out_ptr.dtype.element_ty)
        gl.store(target, result, mask=(row < num_rows)[None, :])


@gluon.jit(
    do_not_specialize=[
        "batch",
        "num_heads_q",
        "num_rows",
        "capacity",
        "workers",
        *OUTPUT_STRIDES,
    ],
    do_not_specialize_on_alignment=UNALIGNED,
)
def _mla_combine_kernel(
    cache_seqlens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    batch,
    num_heads_q,
    num_rows,
    capacity,
    workers,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    out_stride_v,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
    N: gl.constexpr,
    RG: gl.constexpr,
    BP: gl.constexpr,
    SINK: gl.constexpr,
    PDL: gl.constexpr,
    SPLIT: gl.constexpr,
    E: gl.constexpr,
    W: gl.constexpr,
    NW: gl.constexpr,
):
    b = gl.program_id(0) // RG
    rg = gl.program_id(0) % RG
    rank = gl.program_id(1)
    # The decode kernel lets this one start once its own inputs are visible: planning overlaps it.
    first, parts, first_slot = plan_sequence(
        cache_seqlens_ptr, batch, capacity, b, workers, BP, NW
    )
    SLOTS: gl.constexpr = 1 if BP == 1 else 2
    out_row_ptr = out_ptr + b.to(gl.int64) * out_stride_b
    lse_row_ptr = lse_ptr + b.to(gl.int64) * lse_stride_b
    # The first turn merges nothing: it brings the code into the caches while the decode kernel
    # still runs.
    turn = 0
    while turn < 2:
        if PDL:  # noqa: SIM102 (decided when the kernel is compiled)
            if turn == 1:
                # Every block waits, those without work too: when this grid completes, the next
                # kernel takes the decode kernel for complete as well.
                gdc_wait()
                gdc_launch_dependents()
        if parts > 1:
            _combine_units(
                *(part_out_ptr, part_lse_ptr, sink_ptr, out_row_ptr, lse_row_ptr),
                *(first, parts * turn, first_slot, rg, rank, num_heads_q, num_rows * turn),
                *(out_stride_s, out_stride_h, out_stride_v, lse_stride_h, lse_stride_s),
                *(N, RG, SLOTS, SINK, SPLIT, E, W, NW),
            )
        turn += 1
