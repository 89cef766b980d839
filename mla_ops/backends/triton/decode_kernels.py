"""The main kernel of the split-KV decode: persistent, one equal run of KV tiles a program.

A tile is loaded once and serves K and V. A run that covers a sequence whole writes its output;
otherwise it leaves a normalised partial and its base-2 log-sum-exp for the combine kernel. Every
program has two slots for those: 0 for a sequence that began in an earlier run, 1 for a sequence
that begins in this run and goes on in the next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_ops.backends.triton.combine_kernels import count_tiles, locate_run, sink_share

__all__ = ["decode_kernel"]

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    # The interpreter returns garbage for bfloat16 dots; float32 inputs want float32 products.
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _late_zero(unknown):
    """Return 0 from a value that is never negative, which the compiler cannot know.

    Indices that start from it are neither hoisted out of the loop over sequences nor kept over
    the loop over tiles, where the registers of addresses made the 64-row kernel spill 290 times.
    """
    return tl.multiple_of(tl.minimum(unknown, 0), 16)


@triton.jit
def _query_rows(first, heads, BLOCK_H: tl.constexpr, ONE_QUERY: tl.constexpr):
    """Return (row, query, head) from row ``first`` on; rows run over queries, then heads."""
    row = first + tl.arange(0, BLOCK_H)
    if ONE_QUERY:
        return row, row * 0, row
    return row, row // heads, row % heads


# Longer than 50 lines: what the loop carries stays in registers only inside one function.
@triton.jit(
    do_not_specialize=["batch", "heads", "seqlen_q", "pages", "max_tokens", "table_stride"],
    do_not_specialize_on_alignment=["cache_seqlens_ptr", "table_ptr", "sink_ptr"],
)
def decode_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    cache_seqlens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    batch,
    heads,
    seqlen_q,
    pages,
    max_tokens,
    table_stride,
    page_stride,
    q_b,
    q_s,
    q_h,
    out_b,
    out_s,
    out_h,
    out_v,
    lse_b,
    lse_h,
    lse_s,
    scale_log2,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    CHUNKED: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    SINK: tl.constexpr,
    UNIT_OUT: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend one worker's run of tiles for one row group, sequence by sequence."""
    WHOLE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    PER_PAGE: tl.constexpr = PAGE_SIZE // BLOCK_N if WHOLE_PAGE else 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Row groups are neighbours, so that the groups of a sequence share its tiles in L2.
    group = tl.program_id(0) % GROUPS
    worker = tl.program_id(0) // GROUPS
    workers = tl.num_programs(0) // GROUPS
    cur, stop, sequence, origin = locate_run(
        cache_seqlens_ptr, batch, max_tokens, worker, workers, BLOCK_N, BATCH_BLOCK, CHUNKED
    )
    token = tl.arange(0, BLOCK_N)
    latent = tl.arange(0, LATENT)
    while cur < stop:
        length = tl.load(cache_seqlens_ptr + sequence)
        length = tl.minimum(tl.maximum(length, 0), max_tokens)
        count = count_tiles(length, BLOCK_N)
        segment_end = tl.minimum(stop, origin + count)
        first_row = group * BLOCK_H + _late_zero(sequence)
        row, query, head = _query_rows(first_row, heads, BLOCK_H, ONE_QUERY)
        live = row < heads * seqlen_q
        q_row = q_ptr + sequence.to(tl.int64) * q_b + head.to(tl.int64) * q_h
        if not ONE_QUERY:
            q_row += query.to(tl.int64) * q_s
        q_latent = tl.load(q_row[:, None] + latent[None, :], mask=live[:, None], other=0.0)
        if ROPE > 0:
            rope = tl.arange(0, ROPE)
            q_rope = tl.load(
                q_row[:, None] + (LATENT + rope)[None, :], mask=live[:, None], other=0.0
            )
        if CAUSAL:
            limit = length - seqlen_q + query + 1
        top = tl.full([BLOCK_H], -float("inf"), tl.float32)
        norm = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, LATENT], tl.float32)
        table = table_ptr + sequence.to(tl.int64) * table_stride
        first_tile = cur - origin
        last_tile = segment_end - origin
        # The page of a tile is loaded one tile ahead: its latency hides behind the products.
        if WHOLE_PAGE:
            page = tl.load(table + first_tile // PER_PAGE, mask=length > 0, other=0)
        else:
            position = first_tile * BLOCK_N + token
            page = tl.load(table + position // PAGE_SIZE, mask=position < length, other=0)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            position = tile * BLOCK_N + token
            # A page outside the pool shows no keys.
            present = position < tl.where((page >= 0) & (page < pages), length, 0)
            if WHOLE_PAGE:
                # One 64-bit base a tile, 32-bit offsets within: cheaper than 64-bit rows.
                base = kv_ptr + page.to(tl.int64) * page_stride
                line = (tile % PER_PAGE) * BLOCK_N + token
                if PAGE_SIZE * ROW_STRIDE >= 2**31:
                    line = line.to(tl.int64)
                line = line * ROW_STRIDE
                page = tl.load(table + (tile + 1) // PER_PAGE, mask=tile + 1 < last_tile, other=0)
            else:
                base = kv_ptr
                line = page.to(tl.int64) * page_stride
                line += (position % PAGE_SIZE).to(tl.int64) * ROW_STRIDE
                ahead = position + BLOCK_N
                page = tl.load(
                    table + ahead // PAGE_SIZE,
                    mask=(ahead < length) & (tile + 1 < last_tile),
                    other=0,
                )
            keys = tl.load(
                base + line[:, None] + latent[None, :], mask=present[:, None], other=0.0
            )
            score = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            score = _dot(q_latent, tl.trans(keys), score, WIDE)
            if ROPE > 0:
                rope_keys = tl.load(
                    base + line[:, None] + (LATENT + rope)[None, :],
                    mask=present[:, None],
                    other=0.0,
                )
                score = _dot(q_rope, tl.trans(rope_keys), score, WIDE)
            seen = present[None, :]
            if CAUSAL:
                seen = seen & (position[None, :] < limit[:, None])
            score = tl.where(seen, score * scale_log2, -float("inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            reference = tl.where(higher == -float("inf"), 0.0, higher)
            decay = tl.exp2(top - reference)
            weight = tl.exp2(score - reference[:, None])
            norm = norm * decay + tl.sum(weight, 1)
            top = higher
            if not WIDE:
                weight = weight.to(keys.dtype)
            acc = _dot(weight, keys, acc * decay[:, None], WIDE)

        empty = norm == 0.0
        lse2 = top + tl.log2(norm)
        factor = tl.where(empty, 0.0, 1.0 / norm)
        column = _late_zero(segment_end) + tl.arange(0, LATENT)
        if segment_end - cur == count:
            first_row = group * BLOCK_H + _late_zero(segment_end)
            row, query, head = _query_rows(first_row, heads, BLOCK_H, ONE_QUERY)
            live = row < heads * seqlen_q
            if SINK:
                factor *= sink_share(lse2, sink_ptr, head, live)
            out_row = out_ptr + sequence.to(tl.int64) * out_b + head.to(tl.int64) * out_h
            lse_row = lse_ptr + sequence.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h
            if not ONE_QUERY:
                out_row += query.to(tl.int64) * out_s
                lse_row += query.to(tl.int64) * lse_s
            if UNIT_OUT:
                out_tile = out_row[:, None] + column[None, :]
            else:
                out_tile = out_row[:, None] + (column.to(tl.int64) * out_v)[None, :]
            acc = acc * factor[:, None]
            tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])
            tl.store(lse_row, lse2 * _LN2, mask=live)
        else:
            slot = 2 * tl.program_id(0) + (first_tile == 0).to(tl.int32)
            row = slot * BLOCK_H + _late_zero(segment_end) + tl.arange(0, BLOCK_H)
            partial = partial_ptr + row[:, None] * LATENT + column[None, :]
            tl.store(partial, (acc * factor[:, None]).to(partial_ptr.dtype.element_ty))
            tl.store(partial_lse_ptr + row, lse2)
        cur = segment_end
        origin += count
        sequence += 1
