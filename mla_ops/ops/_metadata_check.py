"""The check of mla_metadata: one sequence of refusals, the same for fake and kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.ops._library import refuse_shared_memory
from mla_ops.ops._selection import check_backend_name
from mla_ops.shapes import METADATA_FIELDS

__all__ = ["check_metadata", "check_out"]

SCHEDULES = ("auto", "flash_mla", "balanced")


def check_metadata(
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
    """Refuse inputs that do not fit; ``parts`` is T where this call chooses it."""
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


def check_out(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    topk_length: Tensor | None,
    *,
    traced: bool,
) -> None:
    """Refuse output tensors that do not fit, or share memory with an input or each other."""
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
