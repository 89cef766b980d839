# mypy: disable-error-code="no-untyped-def,misc"
"""The decode kernel: operands swapped, so that the tokens of a tile fill wgmma's M.

S^T [64 tokens, N rows] = K Q^T and O^T [512, N rows] = V^T P^T, where V^T is a transposed view of
the K tile in shared memory: each KV byte is read once, and 16 heads waste nothing. One block per
SM walks its share of the tiles (schedule_kernels.py) with two stages of TMA; the scores of a tile
follow the sums of the one before without a pause between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from mla_ops.backends.gluon.product_kernels import begin_scores, begin_sums, finish_scores
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
    linger,
    load_length,
    plan_worker,
    tiles_of,
)
from mla_ops.backends.gluon.softmax_kernels import totals_of, weigh, weigh_first
from mla_ops.backends.gluon.tile_kernels import (
    HALF,
    expect_tile,
    fetch,
    fetch_left,
    fetch_right,
    load_pages,
    look_ahead,
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
        "workers",
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
    workers,
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
    """Decode a worker's share, as one function: products in flight cross no call."""
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
    stage_queries(queries, rg, num_heads_q, N, NW)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b, tile, count = plan_worker(cache_seqlens_ptr, batch, capacity, worker, workers, BP, NW)
    if (count <= 0) | (worker >= workers):
        linger()
    else:
        table = (block_table_ptr, table_stride, cache_seqlens_ptr, batch, capacity)
        pool = (num_pages, page_rows)
        # The producer's cursor runs two tiles ahead of the products.
        length = load_length(cache_seqlens_ptr, b, capacity)
        pages_first = load_pages(table, b, tile, length, P)
        second, pages_second = next_tile(table, (b, tile, length, tiles_of(length)), BP, P)
        ahead, pages = next_tile(table, second, BP, P)
        expect_tile(left_bars.index(0), right_bars.index(0), True, ROPE)
        expect_tile(left_bars.index(1), right_bars.index(1), count > 1, ROPE)
        gl.thread_barrier()
        rows, absent = tile_rows(pages_first, tile, pool, P)
        fetch(
            *(kv_half, kv_rope, rows, left_bars.index(0), right_bars.index(0)),
            *(left.index(0), right.index(0), rope.index(0), P, ROPE),
        )
        q_first, q_second, q_third = load_q(
            *(q_ptr, b, rg, queries, num_rows, num_heads_q),
            *(q_stride_b, q_stride_s, q_stride_h, N, ROPE, NW),
        )
        rows, absent_next = tile_rows(pages_second, second[1], pool, P)
        stage_q(q_first, q_second, q_third, q_left, q_right, q_tail, ROPE)
        # Only now: the second tiles of all blocks would hold up q and the first ones.
        if count > 1:
            fetch(
                *(kv_half, kv_rope, rows, left_bars.index(1), right_bars.index(1)),
                *(left.index(1), right.index(1), rope.index(1), P, ROPE),
            )
        done = 0
        stage = 0
        phase = 0
        slot = pid if BP == 1 else 2 * pid
        while done < count:
            length = load_length(cache_seqlens_ptr, b, capacity)
            tiles = tiles_of(length)
            stop = gl.minimum(tile + count - done, tiles)
            part = (tile > 0) | (stop < tiles)
            # A zero the compiler cannot fold, here and below: what depends on it is computed where
            # it is used, not before the loop and kept (at 16 rows 183 registers, not 231).
            zero = done >> 28
            if BP > 1:
                # Computed again: kept, it is spilled at 64 causal rows.
                rg = (slot >> 1) % RG
                if done > 0:
                    # Times 16, so that loads of q stay 16 bytes wide.
                    q_first, q_second, q_third = load_q(
                        *(q_ptr, b, rg, queries, num_rows, num_heads_q),
                        *(q_stride_b + zero * 16, q_stride_s, q_stride_h, N, ROPE, NW),
                    )
                    stage_q(q_first, q_second, q_third, q_left, q_right, q_tail, ROPE)

            acc_left = gl.zeros([HALF, N], gl.float32, layout=accum)
            acc_right = gl.zeros([HALF, N], gl.float32, layout=accum)
            # -inf when scaled.
            masked = gl.where(qk_scale < zero, float("inf"), -float("inf"))
            # The first query sees the tokens before this one.
            limit = length
            if CAUSAL:
                limit = length - num_rows // num_heads_q + 1
            mbarrier.wait(left_bars.index(stage), phase)
            s = begin_scores(left, q_left, stage, zero, N, score)
            mbarrier.wait(right_bars.index(stage), phase)
            s = finish_scores(right, rope, q_right, q_tail, stage, zero, s, ROPE)
            s = warpgroup_mma_wait(0, deps=[s, left, right, rope, q_left, q_right, q_tail])[0]
            p, m, total = weigh_first(
                *(s, tile, absent, limit, queries, masked, qk_scale, N, NW, P, CAUSAL, score)
            )
            weights.store(p.to(dtype))
            while tile + 1 < stop:
                zero = done >> 28
                more = done + STAGES < count
                expect_tile(left_bars.index(stage), right_bars.index(stage), more, ROPE)
                fence_async_shared()
                gl.thread_barrier()
                acc_left, acc_right = begin_sums(left, right, stage, weights, acc_left, acc_right)
                # Beside the products: where the tile after next lies, and its successor's pages.
                absent = absent_next
                rows, absent_next, ahead, pages = look_ahead(table, pool, ahead, pages, BP, P)
                used = stage
                done += 1
                tile += 1
                # Counted by hand: of done % 2, the compiler keeps each multiple it needs.
                phase ^= stage
                stage = 1 - stage
                acc_left = warpgroup_mma_wait(1, deps=[acc_left, left, weights])[0]
                gl.thread_barrier()
                if more:
                    fetch_left(kv_half, rows, left_bars.index(used), left.index(used), P)
                mbarrier.wait(left_bars.index(stage), phase)
                s = begin_scores(left, q_left, stage, zero, N, score)
                acc_right = warpgroup_mma_wait(1, deps=[acc_right, right, weights])[0]
                gl.thread_barrier()
                if more:
                    fetch_right(
                        *(kv_half, kv_rope, rows, right_bars.index(used), right.index(used)),
                        *(rope.index(used), P, ROPE),
                    )
                mbarrier.wait(right_bars.index(stage), phase)
                s = finish_scores(right, rope, q_right, q_tail, stage, zero, s, ROPE)
                s = warpgroup_mma_wait(0, deps=[s, left, right, rope, q_left, q_right, q_tail])[0]
                p, m, total, acc_left, acc_right = weigh(
                    *(s, m, total, acc_left, acc_right, tile, absent),
                    *(limit, queries, masked, qk_scale, N, NW, P, CAUSAL, score, accum_row),
                )
                weights.store(p.to(dtype))

            rest = length - tile * TILE
            if rest < TILE:
                # Unwritten slots may hold NaN, and 0 * NaN is NaN.
                zero_rows(left.index(stage), rest, NW)
                zero_rows(right.index(stage), rest, NW)
            more = done + STAGES < count
            if BP > 1:
                expect_tile(left_bars.index(stage), right_bars.index(stage), more, ROPE)
            fence_async_shared()
            gl.thread_barrier()
            acc_left, acc_right = begin_sums(left, right, stage, weights, acc_left, acc_right)
            # A sole sequence ends with the block's share: nothing is left to fetch.
            if BP > 1:
                absent = absent_next
                rows, absent_next, ahead, pages = look_ahead(table, pool, ahead, pages, BP, P)
            acc_left, acc_right, _, _, _ = warpgroup_mma_wait(
                0, deps=[acc_left, acc_right, left, right, weights]
            )
            gl.thread_barrier()
            if BP > 1:  # noqa: SIM102 (decided when the kernel is compiled)
                if more:
                    fetch(
                        *(kv_half, kv_rope, rows, left_bars.index(stage), right_bars.index(stage)),
                        *(left.index(stage), right.index(stage), rope.index(stage), P, ROPE),
                    )
            done += 1
            phase ^= stage
            stage = 1 - stage

            row_total = totals_of(total, N, score)
            late = done >> 28
            if part:
                store_partial(
                    *(acc_left, acc_right, m, row_total, q_left, q_right),
                    *(part_out_ptr, part_lse_ptr, slot + late, N, NW, accum, score_row),
                )
            else:
                store_result(
                    *(acc_left, acc_right, m, row_total, sink_ptr, out_ptr, lse_ptr),
                    *(queries, b, rg, late, num_rows, num_heads_q),
                    *(out_stride_b, out_stride_s, out_stride_h, out_stride_v),
                    *(lse_stride_b, lse_stride_h, lse_stride_s, N, SINK, accum, score_row),
                )
            if BP > 1:
                slot |= 1
            b += 1
            tile = 0
