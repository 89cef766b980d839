"""The plan of the split-KV decode, computed on device, and the combine of its partials.

Work is a line of KV tiles, sequence after sequence; every worker takes a run of ``quota`` tiles
of it (stream-K). Both kernels derive the same runs from the lengths at each launch, so a captured
graph serves any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["combine_kernel", "count_tiles", "locate_run", "sink_share"]

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def count_tiles(length, BLOCK_N: tl.constexpr):
    """Count the tiles of a sequence: an empty one has a tile too, or nobody writes its output."""
    return tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)


@triton.jit
def _load_tiles(cache_seqlens_ptr, sequences, batch, max_tokens, BLOCK_N: tl.constexpr):
    inside = sequences < batch
    length = tl.load(cache_seqlens_ptr + sequences, mask=inside, other=0)
    length = tl.minimum(tl.maximum(length, 0), max_tokens)
    return tl.where(inside, count_tiles(length, BLOCK_N), 0)


@triton.jit
def _quota(total, longest, workers, BATCH_BLOCK: tl.constexpr):
    """Return the tiles of a run: at least ``total / workers``, rounded up to whole sequences.

    Runs that end where sequences end leave fewer partials; 3 % more tiles a run are worth that
    (2 to 6 % at batch 128).
    """
    quota = (total + workers - 1) // workers
    if BATCH_BLOCK > 1:
        even = (longest + longest // quota - 1) // tl.maximum(longest // quota, 1)
        whole = (quota + longest - 1) // longest * longest
        aligned = tl.where(quota < longest, even, whole)
        quota = tl.where(aligned - quota <= quota // 32, aligned, quota)
    return quota


@triton.jit
def locate_run(
    cache_seqlens_ptr,
    batch,
    max_tokens,
    worker,
    workers,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Return (first tile, end tile, sequence of the first tile, first tile of that sequence)."""
    index = tl.arange(0, BATCH_BLOCK)
    tiles = _load_tiles(cache_seqlens_ptr, index, batch, max_tokens, BLOCK_N)
    total = tl.sum(tiles, 0)
    longest = tl.max(tiles, 0)
    if CHUNKED:
        for base in range(BATCH_BLOCK, batch, BATCH_BLOCK):
            more = _load_tiles(cache_seqlens_ptr, base + index, batch, max_tokens, BLOCK_N)
            total += tl.sum(more, 0)
            longest = tl.maximum(longest, tl.max(more, 0))
    quota = _quota(total, longest, workers, BATCH_BLOCK)
    start = worker * quota
    ends = tl.cumsum(tiles, 0)
    before = (ends <= start) & (index < batch)
    sequence = tl.sum(before.to(tl.int32), 0)
    origin = tl.max(tl.where(before, ends, 0), 0)
    if CHUNKED:
        passed = tl.sum(tiles, 0)
        for base in range(BATCH_BLOCK, batch, BATCH_BLOCK):
            more = _load_tiles(cache_seqlens_ptr, base + index, batch, max_tokens, BLOCK_N)
            ends = passed + tl.cumsum(more, 0)
            before = (ends <= start) & (base + index < batch)
            sequence += tl.sum(before.to(tl.int32), 0)
            origin = tl.maximum(origin, tl.max(tl.where(before, ends, 0), 0))
            passed += tl.sum(more, 0)
    return start, tl.minimum(start + quota, total), sequence, origin


@triton.jit
def _locate_sequence(
    cache_seqlens_ptr,
    batch,
    max_tokens,
    sequence,
    workers,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Return (first tile of the sequence, its tiles, tiles of a run)."""
    index = tl.arange(0, BATCH_BLOCK)
    tiles = _load_tiles(cache_seqlens_ptr, index, batch, max_tokens, BLOCK_N)
    total = tl.sum(tiles, 0)
    longest = tl.max(tiles, 0)
    origin = tl.sum(tl.where(index < sequence, tiles, 0), 0)
    count = tl.sum(tl.where(index == sequence, tiles, 0), 0)
    if CHUNKED:
        for base in range(BATCH_BLOCK, batch, BATCH_BLOCK):
            more = _load_tiles(cache_seqlens_ptr, base + index, batch, max_tokens, BLOCK_N)
            total += tl.sum(more, 0)
            longest = tl.maximum(longest, tl.max(more, 0))
            origin += tl.sum(tl.where(base + index < sequence, more, 0), 0)
            count += tl.sum(tl.where(base + index == sequence, more, 0), 0)
    return origin, count, _quota(total, longest, workers, BATCH_BLOCK)


@triton.jit
def sink_share(lse2, sink_ptr, head, mask):
    """Return exp(lse) / (exp(lse) + exp(sink)), 0 for an empty row."""
    sink = tl.load(sink_ptr + head, mask=mask, other=0.0) * _LOG2E
    share = 1.0 / (1.0 + tl.exp2(sink - lse2))
    # A sink of -inf beside an empty row is -inf - -inf.
    return tl.where(lse2 == -float("inf"), 0.0, share)


@triton.jit(
    do_not_specialize=["batch", "heads", "seqlen_q", "max_tokens", "workers"],
    do_not_specialize_on_alignment=["cache_seqlens_ptr", "sink_ptr"],
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
    max_tokens,
    workers,
    out_b,
    out_s,
    out_h,
    out_v,
    lse_b,
    lse_h,
    lse_s,
    LATENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    CHUNKED: tl.constexpr,
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
    origin, count, quota = _locate_sequence(
        cache_seqlens_ptr, batch, max_tokens, sequence, workers, BLOCK_N, BATCH_BLOCK, CHUNKED
    )
    first = origin // quota
    splits = (origin + count - 1) // quota - first + 1
    # A sequence within one run is written by the main kernel.
    units = 0
    if splits > 1:
        rows = tl.minimum(heads * seqlen_q - group * BLOCK_H, BLOCK_H)
        units = rows * (LATENT // COLUMNS)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, COLUMNS)
    for unit in range(tl.program_id(1), units, tl.num_programs(1)):
        local = unit // (LATENT // COLUMNS)
        start = (unit % (LATENT // COLUMNS)) * COLUMNS
        top = -float("inf")
        norm = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for base in range(0, splits, SPLITS):
            here = base + split
            slot = 2 * ((first + here) * GROUPS + group) + (here == 0).to(tl.int32)
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
        lse2 = top + tl.log2(norm)
        factor = tl.where(empty, 0.0, 1.0 / norm)
        row = group * BLOCK_H + local
        head = (row % heads).to(tl.int64)
        query = (row // heads).to(tl.int64)
        if SINK:
            factor *= sink_share(lse2, sink_ptr, head, row >= 0)
        out_row = out_ptr + sequence.to(tl.int64) * out_b + query * out_s + head * out_h
        out_part = out_row + (start + column).to(tl.int64) * out_v
        tl.store(out_part, (acc * factor).to(out_ptr.dtype.element_ty))
        if start == 0:
            lse_row = lse_ptr + sequence.to(tl.int64) * lse_b + head * lse_h + query * lse_s
            tl.store(lse_row, lse2 * _LN2)
