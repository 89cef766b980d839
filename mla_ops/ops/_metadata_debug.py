"""The debug check of a schedule: does it fit the lengths, batch and heads it is used with?

Nobody else can tell: a schedule is a tensor of the right shape whatever lengths it was computed
for, and a stale one gives wrong numbers. The check recomputes the schedule on the host, so it
costs a sync. ``MLA_OPS_CHECK_METADATA=1`` (read at import) runs it before every decode that was
given metadata, except inside a CUDA graph capture, where a sync is not allowed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from mla_ops._torch import inside_graph
from mla_ops.ops._selection import kernel
from mla_ops.ops.metadata import MLAMetadata, default_num_sm_parts
from mla_ops.shapes import METADATA_FIELDS, SPLIT_OVERHEAD_BLOCKS, DecodeShape

__all__ = ["CHECK_METADATA", "check_before_launch", "check_metadata"]

CHECK_METADATA = os.environ.get("MLA_OPS_CHECK_METADATA", "0") not in ("", "0")
# The last field of a row is padding that no kernel reads; FlashMLA's own scheduler leaves junk.
_READ_FIELDS = METADATA_FIELDS - 1


def check_metadata(
    metadata: MLAMetadata | tuple[Tensor, Tensor],
    cache_seqlens: Tensor,
    *,
    num_heads_q: int,
    seqlen_q: int = 1,
) -> None:
    """Raise if ``metadata`` is not the schedule of these lengths, batch, heads and queries.

    Any schedule mla_ops or FlashMLA's own scheduler computes passes, idle rows and padding aside.
    It synchronises with the device, and does nothing inside a compiled region or a CUDA graph
    capture: call it between steps.

    Args:
        metadata: tile_scheduler_metadata int32 [T, 8] and num_splits int32 [B + 1].
        cache_seqlens: [B] int32, the present lengths.
        num_heads_q: H of the decode call.
        seqlen_q: S of the decode call.

    Raises:
        ValueError: naming what does not match: the batch, num_heads_q and seqlen_q, or the
            lengths.
    """
    if inside_graph() is None:
        rows, splits = metadata
        problem = _mismatch(rows, splits, cache_seqlens, num_heads_q, seqlen_q)
        if problem is not None:
            raise ValueError(f"check_metadata: {problem}")


def check_before_launch(args: Any, shape: DecodeShape) -> None:
    """Check the metadata of a decode about to run, and that its lengths fit the block table."""
    if shape.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    cache_seqlens: Tensor = args[3]
    capacity = shape.max_pages * shape.page_size
    longest = int(cache_seqlens.max())
    if longest > capacity:
        raise ValueError(
            f"mla_decode: cache_seqlens must be at most M * P = {capacity} (the width of "
            f"block_table in tokens), got {longest} (widen the table, or cap the lengths)"
        )
    problem = _mismatch(args[4], args[5], cache_seqlens, shape.num_heads_q, shape.seqlen_q)
    if problem is not None:
        raise ValueError(f"mla_decode: {problem}")


def _mismatch(
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    cache_seqlens: Tensor,
    num_heads_q: int,
    seqlen_q: int,
) -> str | None:
    """Say what does not match, or None."""
    batch = cache_seqlens.shape[0]
    if num_splits.shape[0] != batch + 1:
        return _wrong_batch(num_splits.shape[0] - 1, batch)
    parts = default_num_sm_parts(cache_seqlens.device, num_heads_q, seqlen_q)
    if tile_scheduler_metadata.shape[0] != parts:
        return (
            f"metadata must be of T = {parts} rows for num_heads_q={num_heads_q}, "
            f"seqlen_q={seqlen_q}, got {tile_scheduler_metadata.shape[0]} rows (it was computed "
            "for another num_heads_q or seqlen_q, or with num_sm_parts=...)"
        )
    lengths, rows, splits = cache_seqlens.cpu(), tile_scheduler_metadata.cpu(), num_splits.cpu()
    found = [
        _differences(rows, splits, *_schedule_of(lengths, parts, schedule))
        for schedule in ("balanced", "flash_mla")
    ]
    # Whichever schedule was meant is the one it is closer to.
    differences = min(found, key=len)
    if not differences:
        return None
    scheduled = _requests(rows)
    if scheduled != batch:
        return _wrong_batch(scheduled, batch)
    return (
        f"metadata must be the schedule of the present cache_seqlens, got {differences[0]} "
        "(it was computed for other lengths: call mla_metadata, or MLAMetadataBuffers.update, "
        "after every change of a length)"
    )


def _wrong_batch(got: int, batch: int) -> str:
    return (
        f"metadata must be of the batch of cache_seqlens, {batch} sequences, got a schedule of "
        f"{got} (compute it for this batch, padding rows included)"
    )


def _schedule_of(lengths: Tensor, parts: int, schedule: str) -> tuple[Tensor, Tensor]:
    rows = torch.empty((parts, METADATA_FIELDS), dtype=torch.int32)
    splits = torch.empty((lengths.shape[0] + 1,), dtype=torch.int32)
    kernel("reference", "mla_metadata_out")(
        *(lengths, rows, splits),
        overhead=SPLIT_OVERHEAD_BLOCKS,
        topk=None,
        topk_length=None,
        schedule=schedule,
    )
    return rows, splits


def _differences(rows: Tensor, splits: Tensor, wanted: Tensor, wanted_splits: Tensor) -> list[str]:
    """Describe every row and entry that differs from the wanted schedule."""
    batch = splits.shape[0] - 1
    idle = wanted[:, 0] >= batch
    same = (rows[:, :_READ_FIELDS] == wanted[:, :_READ_FIELDS]).all(1)
    wrong_rows = torch.where(idle, rows[:, 0] < batch, ~same).nonzero().flatten().tolist()
    wrong_splits = (splits != wanted_splits).nonzero().flatten().tolist()
    return [
        *(f"row {i} = {rows[i].tolist()} instead of {wanted[i].tolist()}" for i in wrong_rows),
        *(
            f"num_splits[{i}] = {int(splits[i])} instead of {int(wanted_splits[i])}"
            for i in wrong_splits
        ),
    ]


def _requests(rows: Tensor) -> int:
    """Count the sequences a schedule covers: up to the last one of a row that has work."""
    begin, end = rows[:, 0], rows[:, 1]
    busy = (begin >= 0) & (begin <= end)
    return int(torch.where(busy, end + 1, 0).max())
