# mypy: disable-error-code="no-untyped-def,misc"
"""The split-KV decode kernel pair: a persistent main kernel and the combine of its partials.

Work is a line of KV tiles, sequence after sequence; each program takes an equal run of it
(stream-K), planned from the lengths at launch, so a captured graph serves any lengths. A tile is
loaded once and serves K and V. A run that covers a sequence whole writes its output; otherwise it
leaves a normalised partial and its base-2 log-sum-exp: every program has two slots, for the
sequence it starts within and for the one it ends within.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["combine_kernel", "decode_kernel"]

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tiles(lengths_ptr, index, mask, most, BLOCK_N: tl.constexpr):
    """Count the tiles of sequences: an empty one has a tile too, or nobody writes its output."""
    length = tl.load(lengths_ptr + index, mask=mask, other=0)
    length = tl.minimum(tl.maximum(length, 0), most)
    return tl.where(mask, tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1), 0)


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    # The interpreter returns garbage for bfloat16 dots; float32 inputs want float32 products.
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _sink_share(lse2, sink_ptr, head, mask):
    """Return exp(lse) / (exp(lse) + exp(sink)), 0 for an empty row."""
    sink = tl.load(sink_ptr + head, mask=mask, other=0.0) * _LOG2E
    share = 1.0 / (1.0 + tl.exp2(sink - lse2))
    # A sink of -inf beside an empty row is -inf - -inf.
    return tl.where(lse2 == -float("inf"), 0.0, share)


@triton.jit(
    do_not_specialize=["batch", "heads", "seqlen_q", "pages", "max_pages", "table_stride"],
    do_not_specialize_on_alignment=["cache_seqlens_ptr", "table_ptr"],
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
    max_pages,
    table_stride,
    page_stride,
    row_stride,
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
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    SINK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    # Row groups are neighbours, so that the groups of a sequence share its tiles in L2.
    group = tl.program_id(0) % GROUPS
    worker = tl.program_id(0) // GROUPS
    workers = tl.num_programs(0) // GROUPS
    rows = heads * seqlen_q
    most = max_pages * PAGE_SIZE
    WHOLE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    PER_PAGE: tl.constexpr = PAGE_SIZE // BLOCK_N if WHOLE_PAGE else 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    sequences = tl.arange(0, BATCH_BLOCK)
    inside = sequences < batch
    tiles = _tiles(cache_seqlens_ptr, sequences, inside, most, BLOCK_N)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    quota = (total + workers - 1) // workers
    cur = worker * quota
    stop = tl.minimum(cur + quota, total)
    before = (ends <= cur) & inside
    sequence = tl.sum(before.to(tl.int32), 0)
    origin = tl.max(tl.where(before, ends, 0), 0)

    token = tl.arange(0, BLOCK_N)
    latent = tl.arange(0, LATENT)
    row = group * BLOCK_H + tl.arange(0, BLOCK_H)
    live = row < rows
    head = (row % heads).to(tl.int64)
    query = (row // heads).to(tl.int64)
    q_rows = q_ptr + query * q_s + head * q_h
    segment = 0
    while cur < stop:
        length = tl.load(cache_seqlens_ptr + sequence)
        length = tl.minimum(tl.maximum(length, 0), most)
        count = tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)
        segment_end = tl.minimum(stop, origin + count)
        limit = length + tl.zeros([BLOCK_H], tl.int32)
        if CAUSAL:
            limit = length - seqlen_q + query.to(tl.int32) + 1
        q_base = q_rows + sequence.to(tl.int64) * q_b
        q_latent = tl.load(q_base[:, None] + latent[None, :], mask=live[:, None], other=0.0)
        if ROPE > 0:
            rope = tl.arange(0, ROPE)
            q_rope = tl.load(
                q_base[:, None] + LATENT + rope[None, :], mask=live[:, None], other=0.0
            )
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
            present = (position < length) & (page >= 0) & (page < pages)
            if WHOLE_PAGE:
                offset = (tile % PER_PAGE) * BLOCK_N + token
                line = page.to(tl.int64) * page_stride + offset * row_stride
                page = tl.load(table + (tile + 1) // PER_PAGE, mask=tile + 1 < last_tile, other=0)
            else:
                line = page.to(tl.int64) * page_stride + (position % PAGE_SIZE) * row_stride
                ahead = position + BLOCK_N
                page = tl.load(
                    table + ahead // PAGE_SIZE,
                    mask=(ahead < length) & (tile + 1 < last_tile),
                    other=0,
                )
            keys = tl.load(
                kv_ptr + line[:, None] + latent[None, :], mask=present[:, None], other=0.0
            )
            score = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            score = _dot(q_latent, tl.trans(keys), score, WIDE)
            if ROPE > 0:
                key_rope = tl.load(
                    kv_ptr + line[:, None] + LATENT + rope[None, :],
                    mask=present[:, None],
                    other=0.0,
                )
                score = _dot(q_rope, tl.trans(key_rope), score, WIDE)
            seen = present[None, :] & (position[None, :] < limit[:, None])
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
        lse2 = tl.where(empty, -float("inf"), top + tl.log2(tl.where(empty, 1.0, norm)))
        acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, norm))[:, None]
        if segment_end - cur == count:
            if SINK:
                acc = acc * _sink_share(lse2, sink_ptr, head, live)[:, None]
            start = sequence.to(tl.int64)
            out_row = out_ptr + start * out_b + query * out_s + head * out_h
            out_tile = out_row[:, None] + latent[None, :].to(tl.int64) * out_v
            tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])
            lse_row = lse_ptr + start * lse_b + head * lse_h + query * lse_s
            tl.store(lse_row, lse2 * _LN2, mask=live)
        else:
            slot = 2 * tl.program_id(0) + (segment > 0).to(tl.int32)
            slot_row = slot * BLOCK_H + tl.arange(0, BLOCK_H)
            partial = partial_ptr + slot_row[:, None] * LATENT + latent[None, :]
            tl.store(partial, acc.to(partial_ptr.dtype.element_ty))
            tl.store(partial_lse_ptr + slot_row, lse2)
        segment += 1
        cur = segment_end
        origin += count
        sequence += 1


@triton.jit(
    do_not_specialize=["batch", "heads", "seqlen_q", "max_pages", "workers"],
    do_not_specialize_on_alignment=["cache_seqlens_ptr"],
)
def combine_kernel(
    cache_seqlens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    batch,
    heads,
    seqlen_q,
    max_pages,
    workers,
    out_b,
    out_s,
    out_h,
    out_v,
    lse_b,
    lse_h,
    lse_s,
    LATENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partials of one (sequence, row group); the units of COLUMNS are dealt out."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    sequences = tl.arange(0, BATCH_BLOCK)
    tiles = _tiles(cache_seqlens_ptr, sequences, sequences < batch, max_pages * PAGE_SIZE, BLOCK_N)
    total = tl.sum(tiles, 0)
    origin = tl.sum(tl.where(sequences < sequence, tiles, 0), 0)
    count = tl.sum(tl.where(sequences == sequence, tiles, 0), 0)
    quota = (total + workers - 1) // workers
    first = origin // quota
    splits = (origin + count - 1) // quota - first + 1
    if splits > 1:
        # The first worker reaches this sequence in its second segment unless it starts there.
        second = (first * quota < origin).to(tl.int32)
        rows = tl.minimum(heads * seqlen_q - group * BLOCK_H, BLOCK_H)
        PER_ROW: tl.constexpr = LATENT // COLUMNS
        split = tl.arange(0, SPLITS)
        column = tl.arange(0, COLUMNS)
        for unit in range(tl.program_id(1), rows * PER_ROW, tl.num_programs(1)):
            local = unit // PER_ROW
            start = (unit % PER_ROW) * COLUMNS
            top = -float("inf")
            norm = 0.0
            acc = tl.zeros([COLUMNS], tl.float32)
            for base in range(0, splits, SPLITS):
                here = base + split
                slot = 2 * ((first + here) * GROUPS + group) + tl.where(here == 0, second, 0)
                slot_row = slot * BLOCK_H + local
                lse2 = tl.load(partial_lse_ptr + slot_row, mask=here < splits, other=-float("inf"))
                value = tl.load(
                    partial_ptr + (slot_row * LATENT + start)[:, None] + column[None, :],
                    mask=(here < splits)[:, None],
                    other=0.0,
                ).to(tl.float32)
                higher = tl.maximum(top, tl.max(lse2, 0))
                reference = tl.where(higher == -float("inf"), 0.0, higher)
                weight = tl.exp2(lse2 - reference)
                decay = tl.exp2(top - reference)
                acc = acc * decay + tl.sum(value * weight[:, None], 0)
                norm = norm * decay + tl.sum(weight, 0)
                top = higher
            empty = norm == 0.0
            lse2 = tl.where(empty, -float("inf"), top + tl.log2(tl.where(empty, 1.0, norm)))
            acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, norm))
            row = group * BLOCK_H + local
            head = (row % heads).to(tl.int64)
            query = (row // heads).to(tl.int64)
            if SINK:
                acc = acc * _sink_share(lse2, sink_ptr, head, row >= 0)
            out_row = out_ptr + sequence.to(tl.int64) * out_b + query * out_s + head * out_h
            out_part = out_row + (start + column).to(tl.int64) * out_v
            tl.store(out_part, acc.to(out_ptr.dtype.element_ty))
            if start == 0:
                lse_row = lse_ptr + sequence.to(tl.int64) * lse_b + head * lse_h + query * lse_s
                tl.store(lse_row, lse2 * _LN2)
