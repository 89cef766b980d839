# mypy: disable-error-code="no-untyped-def,misc"
"""The decode kernel: operands swapped, so that the tokens of a tile fill wgmma's M.

S^T [64 tokens, N rows] = K Q^T and O^T [512, N rows] = V^T P^T, where V^T is a transposed view of
the K tile in shared memory: each KV byte is read once, and 16 heads waste nothing. One block per
SM walks its share of the tiles (schedule_kernels.py) with two stages of TMA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mla_ops.backends.gluon.row_kernels import (
    OUTPUT_STRIDES,
    UNALIGNED,
    load_q,
    stage_q,
    stage_queries,
    store_partial,
    store_result,
)
from mla_ops.backends.gluon.schedule_kernels import (
    TILE,
    gdc_launch_dependents,
    gdc_wait,
    load_length,
    plan_worker,
    tiles_of,
)
from mla_ops.backends.gluon.softmax_kernels import LOWEST, no_total, totals_of, weigh
from mla_ops.backends.gluon.tile_kernels import (
    HALF,
    absent_bits,
    expect_tile,
    fetch,
    fetch_left,
    fetch_right,
    load_pages,
    next_tile,
    tile_rows,
    zero_rows,
)

STAGES = gl.constexpr(2)


@gluon.jit(
    do_not_specialize=[
        "batch",
        "num_heads_q",
        "num_rows",
        "capacity",
        "num_pages",
        "page_rows",
        "table_stride",
        *OUTPUT_STRIDES,
    ],
    do_not_specialize_on_alignment=["block_table_ptr", *UNALIGNED],
)
def _mla_decode_kernel(
    kv_half,
    kv_rope,
    q_ptr,
    block_table_ptr,
    cache_seqlens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    qk_scale,
    batch,
    num_heads_q,
    num_rows,
    capacity,
    num_pages,
    page_rows,
    table_stride,
    q_stride_b,
    q_stride_s,
    q_stride_h,
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
    P: gl.constexpr,
    ROPE: gl.constexpr,
    CAUSAL: gl.constexpr,
    SINK: gl.constexpr,
    PDL: gl.constexpr,
    NW: gl.constexpr,
):
    dtype: gl.constexpr = kv_half.dtype
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, NW // 4], [16, N // (NW // 4), 16])
    accum: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, N, 16])
    score_row: gl.constexpr = gl.SliceLayout(0, score)
    accum_row: gl.constexpr = gl.SliceLayout(0, accum)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, N], dtype)
    q_half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, HALF], dtype)
    q_rope: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, 64], dtype)
    left = gl.allocate_shared_memory(dtype, [STAGES, TILE, HALF], kv_half.layout)
    right = gl.allocate_shared_memory(dtype, [STAGES, TILE, HALF], kv_half.layout)
    q_left = gl.allocate_shared_memory(dtype, [1, N, HALF], q_half)
    q_right = gl.allocate_shared_memory(dtype, [1, N, HALF], q_half)
    if ROPE > 0:
        rope = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROPE], kv_rope.layout)
        q_tail = gl.allocate_shared_memory(dtype, [1, N, ROPE], q_rope)
    else:
        rope = right
        q_tail = q_right
    weights = gl.allocate_shared_memory(dtype, [TILE, N], p_shared)
    queries = gl.allocate_shared_memory(gl.int32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    left_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(left_bars.index(k), count=1)
        mbarrier.init(right_bars.index(k), count=1)
    fence_async_shared()

    pid = gl.program_id(0)
    # Neighbouring blocks hold the row groups of the same tiles and share them in L2.
    rg = pid % RG
    worker = pid // RG
    workers = gl.num_programs(0) // RG
    stage_queries(queries, rg, num_heads_q, N, NW)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b, tile, count = plan_worker(cache_seqlens_ptr, batch, capacity, worker, workers, BP, NW)
    if count > 0:
        # The producer's cursor runs two tiles ahead of the products.
        length = load_length(cache_seqlens_ptr, b, capacity)
        here0, here1, here2, here3 = load_pages(block_table_ptr, table_stride, b, tile, length, P)
        ahead_b, ahead_tile, ahead_length, ahead_tiles, next0, next1, next2, next3 = next_tile(
            *(block_table_ptr, table_stride, cache_seqlens_ptr, batch, capacity),
            *(b, tile, length, tiles_of(length), BP, P),
        )
        next_in_b = ahead_tile
        ahead_b, ahead_tile, ahead_length, ahead_tiles, page0, page1, page2, page3 = next_tile(
            *(block_table_ptr, table_stride, cache_seqlens_ptr, batch, capacity),
            *(ahead_b, ahead_tile, ahead_length, ahead_tiles, BP, P),
        )
        # Small loads before large ones: they would queue behind the copies of two tiles.
        q_first, q_second, q_third = load_q(
            *(q_ptr, b, rg, queries, num_rows, num_heads_q),
            *(q_stride_b, q_stride_s, q_stride_h, N, ROPE, NW),
        )
        expect_tile(left_bars.index(0), right_bars.index(0), True, ROPE)
        expect_tile(left_bars.index(1), right_bars.index(1), count > 1, ROPE)
        gl.thread_barrier()
        row0, row1, row2, row3 = tile_rows(
            here0, here1, here2, here3, tile, num_pages, page_rows, P
        )
        absent = absent_bits(row0, row1, row2, row3, P)
        fetch(
            *(kv_half, kv_rope, row0, row1, row2, row3, left_bars.index(0), right_bars.index(0)),
            *(left.index(0), right.index(0), rope.index(0), P, ROPE),
        )
        row0, row1, row2, row3 = tile_rows(
            next0, next1, next2, next3, next_in_b, num_pages, page_rows, P
        )
        absent_next = absent_bits(row0, row1, row2, row3, P)
        if count > 1:
            fetch(
                *(kv_half, kv_rope, row0, row1, row2, row3, left_bars.index(1)),
                *(right_bars.index(1), left.index(1), right.index(1), rope.index(1), P, ROPE),
            )
        stage_q(q_first, q_second, q_third, q_left, q_right, q_tail, ROPE)
        done = 0
        stage = 0
        phase = 0
        slot = pid if BP == 1 else 2 * pid
        masked = gl.where(qk_scale < 0, float("inf"), -float("inf"))  # -inf when scaled
        while done < count:
            length = load_length(cache_seqlens_ptr, b, capacity)
            tiles = tiles_of(length)
            stop = gl.minimum(tile + count - done, tiles)
            whole = (tile == 0) & (stop == tiles)
            # A zero the compiler cannot fold: what depends on it is computed where it is used, not
            # before the loop and kept (at 16 rows, 183 registers against 231).
            zero = done >> 28
            group = rg + zero

            if BP > 1:  # noqa: SIM102 (decided when the kernel is compiled)
                if done > 0:
                    q_first, q_second, q_third = load_q(
                        *(q_ptr, b, group, queries, num_rows, num_heads_q),
                        *(q_stride_b + zero, q_stride_s, q_stride_h, N, ROPE, NW),
                    )
                    stage_q(q_first, q_second, q_third, q_left, q_right, q_tail, ROPE)

            m = gl.full([N], LOWEST, gl.float32, layout=score_row)
            total = no_total(N, score)
            acc_left = gl.zeros([HALF, N], gl.float32, layout=accum)
            acc_right = gl.zeros([HALF, N], gl.float32, layout=accum)
            # The first query sees the tokens before this one.
            limit = length
            if CAUSAL:
                limit = length - num_rows // num_heads_q + 1
            begin = tile
            while tile < stop:
                # Again such a zero: with a constant index 36 wgmma descriptors of Q are kept in
                # registers (251 registers and spills, against 164).
                zero = done >> 28
                mbarrier.wait(left_bars.index(stage), phase)
                s = gl.zeros([TILE, N], gl.float32, layout=score)
                s = warpgroup_mma(
                    *(left.index(stage), q_left.index(zero).permute((1, 0)), s),
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(right_bars.index(stage), phase)
                s = warpgroup_mma(
                    right.index(stage), q_right.index(zero).permute((1, 0)), s, is_async=True
                )
                if ROPE > 0:
                    s = warpgroup_mma(
                        rope.index(stage), q_tail.index(zero).permute((1, 0)), s, is_async=True
                    )
                s = warpgroup_mma_wait(0, deps=[s, left, right, rope, q_left, q_right, q_tail])[0]
                rest = length - tile * TILE
                if rest < TILE:
                    # Unwritten slots may hold NaN, and 0 * NaN is NaN.
                    zero_rows(left.index(stage), rest, NW)
                    zero_rows(right.index(stage), rest, NW)
                p, m, total, acc_left, acc_right = weigh(
                    *(s, m, total, acc_left, acc_right, tile == begin, tile, absent),
                    *(limit, queries, masked, qk_scale, N, NW, P, CAUSAL, score, accum_row),
                )
                weights.store(p.to(dtype))
                more = done + STAGES < count
                expect_tile(left_bars.index(stage), right_bars.index(stage), more, ROPE)
                fence_async_shared()
                gl.thread_barrier()
                acc_left = warpgroup_mma(
                    left.index(stage).permute((1, 0)), weights, acc_left, is_async=True
                )
                acc_right = warpgroup_mma(
                    right.index(stage).permute((1, 0)), weights, acc_right, is_async=True
                )
                # Beside the products: where the tile after next lies, and its successor's pages.
                row0, row1, row2, row3 = tile_rows(
                    page0, page1, page2, page3, ahead_tile, num_pages, page_rows, P
                )
                absent = absent_next
                absent_next = absent_bits(row0, row1, row2, row3, P)
                (ahead_b, ahead_tile, ahead_length, ahead_tiles, page0, page1, page2, page3) = (
                    next_tile(
                        *(block_table_ptr, table_stride, cache_seqlens_ptr, batch, capacity),
                        *(ahead_b, ahead_tile, ahead_length, ahead_tiles, BP, P),
                    )
                )
                acc_left = warpgroup_mma_wait(1, deps=[acc_left, left, weights])[0]
                gl.thread_barrier()
                if more:
                    bar = left_bars.index(stage)
                    fetch_left(kv_half, row0, row1, row2, row3, bar, left.index(stage), P)
                acc_right = warpgroup_mma_wait(0, deps=[acc_right, right, weights])[0]
                gl.thread_barrier()
                if more:
                    fetch_right(
                        *(kv_half, kv_rope, row0, row1, row2, row3),
                        *(right_bars.index(stage), right.index(stage), rope.index(stage)),
                        *(P, ROPE),
                    )
                done += 1
                tile += 1
                # Counted by hand: of done % 2, the compiler keeps each multiple it needs.
                phase ^= stage
                stage = 1 - stage

            row_total = totals_of(total, N, NW, score)
            late = done >> 28  # and again
            if whole:
                store_result(
                    *(acc_left, acc_right, m, row_total, sink_ptr, out_ptr, lse_ptr),
                    *(queries, b, rg, late, num_rows, num_heads_q),
                    *(out_stride_b, out_stride_s, out_stride_h, out_stride_v),
                    *(lse_stride_b, lse_stride_h, lse_stride_s, N, SINK, accum, score_row),
                )
            else:
                store_partial(
                    *(acc_left, acc_right, m, row_total, q_left, q_right),
                    *(part_out_ptr, part_lse_ptr, slot + late, N, NW, accum, score_row),
                )
            if BP > 1:
                slot = 2 * pid + 1
            b += 1
            tile = 0
