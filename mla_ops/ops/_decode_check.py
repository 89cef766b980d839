"""The check of mla_decode: one sequence of refusals, the same for fake and kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.formats import DENSE_DTYPES
from mla_ops.ops._library import refuse_shared_memory
from mla_ops.ops.metadata import default_num_sm_parts
from mla_ops.shapes import (
    LATENT_ROPE_PAIRS,
    MAX_HEADS,
    MAX_SEQLEN_Q,
    METADATA_FIELDS,
    has_packed_rows,
)

__all__ = ["check_decode", "check_outputs"]


def check_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool,
    attn_sink: Tensor | None,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
) -> None:
    """Refuse inputs that do not fit, naming the argument, what it must be, what it is, the fix."""
    if descale_q is not None or descale_k is not None:
        name = "descale_k" if descale_q is None else "descale_q"
        raise ValueError(
            f"mla_decode: {name} must be None, got a tensor (FP8 caches are not served yet)"
        )
    _check_q_and_cache(q, kv_cache, head_dim_v)
    _check_table(q, block_table, cache_seqlens)
    device = q.device
    for name, tensor in (
        ("kv_cache", kv_cache),
        ("block_table", block_table),
        ("cache_seqlens", cache_seqlens),
        ("tile_scheduler_metadata", tile_scheduler_metadata),
        ("num_splits", num_splits),
        ("attn_sink", attn_sink),
    ):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"mla_decode: {name} must be on {device} like q, got {tensor.device} (move it)"
            )
    if attn_sink is not None:
        _check_sink(q, attn_sink)
    if tile_scheduler_metadata is not None or num_splits is not None:
        _check_metadata(q, tile_scheduler_metadata, num_splits)


def _check_q_and_cache(q: Tensor, kv_cache: Tensor, head_dim_v: int) -> None:
    if q.dtype not in DENSE_DTYPES:
        raise TypeError(
            f"mla_decode: q must be float64, float32, bfloat16 or float16, got {q.dtype} "
            "(convert it before the call)"
        )
    if kv_cache.dtype != q.dtype:
        raise TypeError(
            f"mla_decode: kv_cache must be {q.dtype} like q, got {kv_cache.dtype} "
            "(convert q; FP8 caches are not served yet)"
        )
    if q.dim() != 4 or not has_packed_rows(q):
        raise ValueError(
            f"mla_decode: q must be [B, S, H, D] with last stride 1, got shape {tuple(q.shape)} "
            f"with strides {q.stride()} (add the sequence dimension, or call .contiguous())"
        )
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1 or not has_packed_rows(kv_cache):
        raise ValueError(
            "mla_decode: kv_cache must be [num_pages, page_size, 1, head_dim] with last stride 1, "
            f"got shape {tuple(kv_cache.shape)} with strides {kv_cache.stride()} "
            "(unsqueeze the head dimension)"
        )
    if kv_cache.shape[1] == 0:
        raise ValueError("mla_decode: kv_cache must be of page_size >= 1, got 0 (allocate pages)")
    if q.shape[3] != kv_cache.shape[3]:
        raise ValueError(
            f"mla_decode: q must be of head_dim {kv_cache.shape[3]} like kv_cache, got "
            f"{q.shape[3]} (concatenate the absorbed latent and the rope)"
        )
    if (head_dim_v, q.shape[3] - head_dim_v) not in LATENT_ROPE_PAIRS:
        raise ValueError(
            "mla_decode: head_dim_v must be the latent of a supported (latent, rope) pair "
            f"{LATENT_ROPE_PAIRS}, got {(head_dim_v, q.shape[3] - head_dim_v)} "
            "(pass head_dim_v=kv_lora_rank)"
        )
    if not 1 <= q.shape[2] <= MAX_HEADS:
        raise ValueError(
            f"mla_decode: q must be of 1 to {MAX_HEADS} heads, got {q.shape[2]} (split the heads)"
        )
    if q.shape[1] > MAX_SEQLEN_Q:
        raise ValueError(
            f"mla_decode: q must be of at most {MAX_SEQLEN_Q} tokens a sequence, got {q.shape[1]} "
            "(prefill with expanded keys, or split the queries)"
        )


def _check_table(q: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
    for name, tensor, dim in (
        ("block_table", block_table, 2),
        ("cache_seqlens", cache_seqlens, 1),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"mla_decode: {name} must be int32, got {tensor.dtype} (use .int())")
        if tensor.dim() != dim or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"mla_decode: {name} must be {'[B, M]' if dim == 2 else '[B]'} with B = "
                f"{q.shape[0]} like q, got shape {tuple(tensor.shape)} (slice it to the batch)"
            )
        if not has_packed_rows(tensor):
            raise ValueError(
                f"mla_decode: {name} must be last stride 1, got strides {tensor.stride()} "
                "(call .contiguous())"
            )


def _check_sink(q: Tensor, attn_sink: Tensor) -> None:
    if attn_sink.dtype != torch.float32:
        raise TypeError(
            f"mla_decode: attn_sink must be float32, got {attn_sink.dtype} (use .float())"
        )
    if tuple(attn_sink.shape) != (q.shape[2],) or not attn_sink.is_contiguous():
        raise ValueError(
            f"mla_decode: attn_sink must be contiguous [H] = [{q.shape[2]}], got shape "
            f"{tuple(attn_sink.shape)} (one logit per query head of this rank)"
        )


def _check_metadata(
    q: Tensor, tile_scheduler_metadata: Tensor | None, num_splits: Tensor | None
) -> None:
    if tile_scheduler_metadata is None or num_splits is None:
        raise ValueError(
            "mla_decode: metadata must be (tile_scheduler_metadata, num_splits), got one of them "
            "(pass what mla_metadata returned)"
        )
    for name, tensor in (
        ("tile_scheduler_metadata", tile_scheduler_metadata),
        ("num_splits", num_splits),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"mla_decode: {name} must be int32, got {tensor.dtype} (use .int())")
        if not tensor.is_contiguous():
            raise ValueError(
                f"mla_decode: {name} must be contiguous, got strides {tensor.stride()} "
                "(take a leading slice)"
            )
    if num_splits.dim() != 1 or num_splits.shape[0] != q.shape[0] + 1:
        raise ValueError(
            f"mla_decode: num_splits must be [B + 1] = [{q.shape[0] + 1}], got shape "
            f"{tuple(num_splits.shape)} (compute mla_metadata for this batch)"
        )
    most = default_num_sm_parts(q.device, q.shape[2], q.shape[1])
    shape = tile_scheduler_metadata.shape
    if len(shape) != 2 or shape[1] != METADATA_FIELDS or not 1 <= shape[0] <= most:
        raise ValueError(
            f"mla_decode: tile_scheduler_metadata must be [T, {METADATA_FIELDS}] with 1 <= T <= "
            f"{most} for num_heads_q={q.shape[2]}, seqlen_q={q.shape[1]}, got shape "
            f"{tuple(shape)} (compute mla_metadata for this num_heads_q and seqlen_q)"
        )


def check_outputs(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool,
    attn_sink: Tensor | None,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    backend: str,
    out: Tensor,
    lse: Tensor,
    *,
    traced: bool,
) -> None:
    """Refuse output tensors that do not fit, or share memory with an input or each other."""
    batch, seqlen_q, heads, _ = q.shape
    wide = (torch.float32,) if q.dtype in (torch.bfloat16, torch.float16) else ()
    for name, tensor, shape, dtypes in (
        ("out", out, (batch, seqlen_q, heads, head_dim_v), (q.dtype, *wide)),
        ("lse", lse, (batch, heads, seqlen_q), (torch.float32,)),
    ):
        if tensor.dtype not in dtypes:
            raise TypeError(
                f"mla_decode: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype} "
                "(allocate it)"
            )
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"mla_decode: {name} must be {'[B, S, H, V]' if name == 'out' else '[B, H, S]'} = "
                f"{shape}, got shape {tuple(tensor.shape)} (allocate it for this call)"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"mla_decode: {name} must be on {q.device} like q, got {tensor.device} (move it)"
            )
    read = [("q", q), ("kv_cache", kv_cache), ("block_table", block_table)]
    refuse_shared_memory(
        "mla_decode",
        [("out", out), ("lse", lse)],
        [
            *(*read, ("cache_seqlens", cache_seqlens), ("num_splits", num_splits)),
            *(("tile_scheduler_metadata", tile_scheduler_metadata), ("attn_sink", attn_sink)),
        ],
        traced=traced,
    )
