"""mla_metadata: the tile scheduler's plan, recomputed on device from the present lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops._torch import streaming_multiprocessors
from mla_ops.formats import KVFormat
from mla_ops.ops._library import register
from mla_ops.ops._metadata_check import check_metadata, check_out
from mla_ops.ops._selection import device_kernel
from mla_ops.shapes import METADATA_FIELDS, SPLIT_OVERHEAD_BLOCKS, num_sm_parts

__all__ = ["MLAMetadata", "mla_metadata"]


class MLAMetadata(NamedTuple):
    """The schedule of one decode step; legal as long as the lengths keep their values."""

    tile_scheduler_metadata: Tensor  # int32 [T, 8]
    num_splits: Tensor  # int32 [B + 1]


def mla_metadata(
    cache_seqlens: Tensor,
    *,
    num_heads_q: int,
    seqlen_q: int = 1,
    num_heads_k: int = 1,
    topk: int | None = None,
    topk_length: Tensor | None = None,
    kv_format: KVFormat | None = None,
    backend: str = "auto",
    schedule: str = "auto",
    num_sm_parts: int | None = None,
    out: MLAMetadata | tuple[Tensor, Tensor] | None = None,
) -> MLAMetadata:
    """Split the KV blocks of a batch evenly over the SM parts of the decode kernel.

    Args:
        cache_seqlens: [B] int32 tokens per sequence, those just appended included; 0 is legal.
        num_heads_q: H, query heads of the decode call.
        seqlen_q: S, query tokens per sequence of the decode call.
        num_heads_k: KV heads; MLA has 1.
        topk: keys per query of a sparse decode; None for a dense one.
        topk_length: [B] int32 valid entries of the sparse indices, at most ``topk``.
        kv_format: format of the cache that will be read; None means dense.
        backend: the backend that will read the metadata; "auto" writes what any can read.
        schedule: "flash_mla" (FlashMLA's own, bit-exact but for idle rows), "balanced" (fewer
            parts where merging them costs more than it saves) or "auto", which is "balanced".
        num_sm_parts: T, rows of the schedule; None means what FlashMLA's SM90 kernel uses on
            this device.
        out: tensors to fill in place, ``MLAMetadata`` of int32 [T, 8] and [B + 1], contiguous:
            leading slices of capacity buffers. None allocates.

    Returns:
        MLAMetadata: ``out`` itself when given.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was written.

    Capture: B, T, H and S are constants of the graph; lengths may change between replays. With
        ``out`` the same addresses are rewritten on every replay.
    Source: FlashMLA's ``get_mla_metadata`` kernel; an idle row has begin_req 2147483647, so that
        it stays idle for every batch size.
    """
    fmt = None if kv_format is None else kv_format.value
    if out is None:
        return MLAMetadata(
            *_op(
                *(cache_seqlens, num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
                *(fmt, backend, schedule, num_sm_parts),
            )
        )
    if num_sm_parts is not None and out[0].shape[0] != num_sm_parts:
        # Dynamo cannot format two symbolic sizes in one string: int() makes them numbers.
        raise ValueError(
            f"mla_metadata: out must be of num_sm_parts = {int(num_sm_parts)} rows, got "
            f"{int(out[0].shape[0])} (pass one of the two)"
        )
    _out_op(
        *(cache_seqlens, out[0], out[1], num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
        *(fmt, backend, schedule),
    )
    return MLAMetadata(*out)


_ARGUMENTS = (
    "SymInt num_heads_q, SymInt seqlen_q, SymInt num_heads_k, SymInt? topk, Tensor? topk_length, "
    "str? kv_format, str backend, str schedule"
)
_SCHEMA = (
    f"mla_metadata(Tensor cache_seqlens, {_ARGUMENTS}, SymInt? num_sm_parts) -> (Tensor, Tensor)"
)
_OUT_SCHEMA = (
    "mla_metadata_out(Tensor cache_seqlens, Tensor(a!) tile_scheduler_metadata, "
    f"Tensor(b!) num_splits, {_ARGUMENTS}) -> ()"
)


def default_num_sm_parts(
    device: torch.device,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int = 1,
    topk: int | None = None,
    kv_format: str | None = None,
) -> int:
    """Return T of a call on ``device`` by FlashMLA's formula; 0 if its kernel cannot serve it."""
    return num_sm_parts(
        streaming_multiprocessors(device),
        num_heads_q=num_heads_q,
        seqlen_q=max(seqlen_q, 1),
        num_heads_k=num_heads_k,
        sparse=topk is not None,
        fp8=topk is None and kv_format == KVFormat.FP8.value,
    )


def _empty_metadata(
    cache_seqlens: Tensor,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int,
    topk: int | None,
    topk_length: Tensor | None,
    kv_format: str | None,
    backend: str,
    schedule: str,
    num_sm_parts: int | None,
) -> tuple[Tensor, Tensor]:
    device = cache_seqlens.device
    # Heads are divided by in the formula: check them before it.
    parts = num_sm_parts
    if parts is None and num_heads_q >= 1 and num_heads_k >= 1:
        parts = default_num_sm_parts(device, num_heads_q, seqlen_q, num_heads_k, topk, kv_format)
    check_metadata(
        *(cache_seqlens, num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
        *(backend, schedule, parts),
    )
    assert parts is not None
    return (
        torch.empty((parts, METADATA_FIELDS), dtype=torch.int32, device=device),
        torch.empty((cache_seqlens.shape[0] + 1,), dtype=torch.int32, device=device),
    )


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty_metadata(*args)


def _dispatch(
    cache_seqlens: Tensor,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int,
    topk: int | None,
    topk_length: Tensor | None,
    kv_format: str | None,
    backend: str,
    schedule: str,
    num_sm_parts: int | None,
) -> tuple[Tensor, Tensor]:
    metadata = _empty_metadata(
        *(cache_seqlens, num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
        *(kv_format, backend, schedule, num_sm_parts),
    )
    fill_metadata(cache_seqlens, *metadata, topk, topk_length, backend, schedule)
    return metadata


def fill_metadata(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    topk: int | None,
    topk_length: Tensor | None,
    backend: str,
    schedule: str,
) -> None:
    """Launch the scheduler that suits the device into checked tensors."""
    name = "reference" if backend == "reference" else None
    device_kernel("mla_metadata_out", cache_seqlens.device, name)(
        cache_seqlens,
        tile_scheduler_metadata,
        num_splits,
        overhead=SPLIT_OVERHEAD_BLOCKS,
        topk=topk,
        topk_length=topk_length,
        schedule="balanced" if schedule == "auto" else schedule,
    )


def _out_fake(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int,
    topk: int | None,
    topk_length: Tensor | None,
    kv_format: str | None,
    backend: str,
    schedule: str,
) -> None:
    check_metadata(
        *(cache_seqlens, num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
        *(backend, schedule, None),
    )
    check_out(cache_seqlens, tile_scheduler_metadata, num_splits, topk_length, traced=True)


def _out_dispatch(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int,
    topk: int | None,
    topk_length: Tensor | None,
    kv_format: str | None,
    backend: str,
    schedule: str,
) -> None:
    check_metadata(
        *(cache_seqlens, num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
        *(backend, schedule, None),
    )
    check_out(cache_seqlens, tile_scheduler_metadata, num_splits, topk_length, traced=False)
    fill_metadata(
        *(cache_seqlens, tile_scheduler_metadata, num_splits, topk, topk_length),
        *(backend, schedule),
    )


_op = register(_SCHEMA, kernel=_dispatch, fake=_fake)
_out_op = register(_OUT_SCHEMA, kernel=_out_dispatch, fake=_out_fake)
