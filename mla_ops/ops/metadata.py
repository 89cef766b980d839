"""mla_metadata: the tile scheduler's plan, recomputed on device from the present lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops._torch import streaming_multiprocessors
from mla_ops.formats import KVFormat
from mla_ops.ops._library import refuse_shared_memory, register
from mla_ops.ops._selection import check_backend_name, device_kernel
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
        schedule: "flash_mla" (FlashMLA's own, bit-exact but for idle rows) or "auto".
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
        raise ValueError(
            f"mla_metadata: out must be of num_sm_parts = {num_sm_parts} rows, got "
            f"{out[0].shape[0]} (pass one of the two)"
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
SCHEDULES = ("auto", "flash_mla", "balanced")


def _check(
    cache_seqlens: Tensor,
    num_heads_q: int,
    seqlen_q: int,
    num_heads_k: int,
    topk: int | None,
    topk_length: Tensor | None,
    backend: str,
    schedule: str,
    parts: int | None,
) -> None:
    _check_lengths("cache_seqlens", cache_seqlens)
    for name, value in (("num_heads_q", num_heads_q), ("num_heads_k", num_heads_k)):
        if value < 1:
            raise ValueError(f"mla_metadata: {name} must be >= 1, got {value} (count the heads)")
    if num_heads_q % num_heads_k != 0:
        raise ValueError(
            f"mla_metadata: num_heads_q must be a multiple of num_heads_k = {num_heads_k}, got "
            f"{num_heads_q} (MLA has one KV head)"
        )
    if seqlen_q < 0:
        raise ValueError(f"mla_metadata: seqlen_q must be >= 0, got {seqlen_q} (use q.shape[1])")
    if topk is not None and topk < 1:
        raise ValueError(
            f"mla_metadata: topk must be >= 1, got {topk} (None means a dense decode)"
        )
    if topk_length is not None:
        if topk is None:
            raise ValueError(
                "mla_metadata: topk_length must be None for a dense decode, got a tensor "
                "(pass topk too)"
            )
        _check_lengths("topk_length", topk_length)
        if topk_length.shape != cache_seqlens.shape or topk_length.device != cache_seqlens.device:
            raise ValueError(
                f"mla_metadata: topk_length must be of shape {tuple(cache_seqlens.shape)} on "
                f"{cache_seqlens.device} like cache_seqlens, got {tuple(topk_length.shape)} on "
                f"{topk_length.device} (one length per sequence)"
            )
    if schedule not in SCHEDULES:
        raise ValueError(
            f"mla_metadata: schedule must be one of {SCHEDULES}, got {schedule!r} (use 'auto')"
        )
    check_backend_name("mla_metadata", backend)
    if parts is not None and parts < 1:
        raise ValueError(
            f"mla_metadata: num_sm_parts must be >= 1, got {parts} "
            "(too many query rows for this kernel's SMs: lower seqlen_q * num_heads_q)"
        )


def _check_lengths(name: str, lengths: Tensor) -> None:
    if lengths.dtype != torch.int32:
        raise TypeError(f"mla_metadata: {name} must be int32, got {lengths.dtype} (use .int())")
    if lengths.dim() != 1 or not lengths.is_contiguous():
        raise ValueError(
            f"mla_metadata: {name} must be contiguous [B], got shape {tuple(lengths.shape)} with "
            f"strides {lengths.stride()} (pass a leading slice)"
        )


def _check_out(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    topk_length: Tensor | None,
    *,
    traced: bool,
) -> None:
    batch = cache_seqlens.shape[0]
    for name, tensor in (
        ("tile_scheduler_metadata", tile_scheduler_metadata),
        ("num_splits", num_splits),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"mla_metadata: {name} must be int32, got {tensor.dtype} (fix out)")
        if tensor.device != cache_seqlens.device:
            raise ValueError(
                f"mla_metadata: {name} must be on {cache_seqlens.device} like cache_seqlens, got "
                f"{tensor.device} (move it)"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"mla_metadata: {name} must be contiguous, got strides {tensor.stride()} "
                "(take leading slices of the capacity buffers)"
            )
    shape = tile_scheduler_metadata.shape
    if len(shape) != 2 or shape[1] != METADATA_FIELDS or shape[0] < 1:
        raise ValueError(
            f"mla_metadata: tile_scheduler_metadata must be [num_sm_parts, {METADATA_FIELDS}], "
            f"got shape {tuple(shape)} (slice the first rows of the capacity buffer)"
        )
    if num_splits.dim() != 1 or num_splits.shape[0] != batch + 1:
        raise ValueError(
            f"mla_metadata: num_splits must be [B + 1] = [{batch + 1}], got shape "
            f"{tuple(num_splits.shape)} (slice num_splits[: B + 1] of a buffer that holds the "
            "largest batch)"
        )
    refuse_shared_memory(
        "mla_metadata",
        [("tile_scheduler_metadata", tile_scheduler_metadata), ("num_splits", num_splits)],
        [("cache_seqlens", cache_seqlens), ("topk_length", topk_length)],
        traced=traced,
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
    _check(
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
    *,
    traced: bool = True,
) -> None:
    _check(
        *(cache_seqlens, num_heads_q, seqlen_q, num_heads_k, topk, topk_length),
        *(backend, schedule, None),
    )
    _check_out(cache_seqlens, tile_scheduler_metadata, num_splits, topk_length, traced=traced)


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
    _out_fake(
        *(cache_seqlens, tile_scheduler_metadata, num_splits, num_heads_q, seqlen_q),
        *(num_heads_k, topk, topk_length, kv_format, backend, schedule),
        traced=False,
    )
    fill_metadata(
        *(cache_seqlens, tile_scheduler_metadata, num_splits, topk, topk_length),
        *(backend, schedule),
    )


_op = register(_SCHEMA, kernel=_dispatch, fake=_fake)
_out_op = register(_OUT_SCHEMA, kernel=_out_dispatch, fake=_out_fake)
