"""mla_decode: attention of a few new queries over the paged latent cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops.ops import _decode_plan
from mla_ops.ops._decode_plan import DecodePlan, check_layout, plan_decode, plan_decode_out
from mla_ops.ops._library import register
from mla_ops.ops._metadata_debug import CHECK_METADATA, check_before_launch
from mla_ops.ops.metadata import MLAMetadata, default_num_sm_parts, fill_metadata
from mla_ops.shapes import METADATA_FIELDS, lse_strides

__all__ = ["MLAOutput", "mla_decode"]


class MLAOutput(NamedTuple):
    """Attention over the keys seen, and the log-sum-exp that merges it with other keys."""

    out: Tensor  # [B, S, H, V], dtype of q or of the caller's out
    lse: Tensor  # float32 [B, H, S]


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    metadata: MLAMetadata | tuple[Tensor, Tensor] | None = None,
    *,
    softmax_scale: float,
    head_dim_v: int = 512,
    causal: bool = True,
    attn_sink: Tensor | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> MLAOutput:
    """Attend from absorbed queries to the latents of their own sequences.

    Args:
        q: [B, S, H, D] absorbed queries, latent then rope; any strides with last stride 1.
        kv_cache: [N, P, 1, D] pages in the dtype of q; K is the row, V its first ``head_dim_v``
            columns. Any page and row strides, last stride 1.
        block_table: [B, M] int32 page of each run of P tokens. Entries past the length are never
            read as pages; a page outside ``[0, N)`` inside the length counts as no keys.
        cache_seqlens: [B] int32 tokens per sequence, those just appended included; clamped to
            ``M * P``. 0 is legal.
        metadata: schedule of ``mla_metadata`` for these lengths; None lets a backend that needs
            one compute it on every call. Backends that plan on device ignore it.
        softmax_scale: factor of the logits; the model's, not ``D ** -0.5``.
        head_dim_v: V, width of the latent.
        causal: query j of S sees keys ``< cache_seqlens - S + j + 1``; otherwise all of them.
        attn_sink: [H] float32 logits of a key without value: out is multiplied by
            ``exp(lse) / (exp(lse) + exp(attn_sink))``, lse excludes it.
        descale_q: for FP8 queries (not served yet).
        descale_k: for FP8 caches (not served yet).
        backend: "auto", or a backend that runs or raises: it never falls back.
        out: [B, S, H, V] tensor to write, any strides; dtype of q, or float32: not rounded to the
            dtype of q (flash_mla cannot). Given together with ``lse``.
        lse: [B, H, S] float32 tensor to write, any strides.

    Returns:
        MLAOutput: a row without keys is out 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was written.
        BackendUnavailableError: the named backend cannot run this call; lists every reason.

    Capture: addresses, shapes, strides and ``softmax_scale`` are constants of the graph;
        lengths, block table entries and values may change between replays.
    Source: DeepSeek-V2 (arXiv 2405.04434), FlashMLA's ``flash_mla_with_kvcache``.
    """
    rows, splits = (None, None) if metadata is None else metadata
    if out is not None and lse is not None:
        # fmt: off
        _out_op(
            q, kv_cache, block_table, cache_seqlens, rows, splits, softmax_scale, head_dim_v,
            causal, attn_sink, descale_q, descale_k, backend, out, lse,
        )
        # fmt: on
        return MLAOutput(out, lse)
    if out is not None or lse is not None:
        raise ValueError(
            "mla_decode: out and lse must be given both or neither, got only "
            f"{'lse' if out is None else 'out'} (allocate the other one)"
        )
    out, lse = _op(
        *(q, kv_cache, block_table, cache_seqlens, rows, splits, softmax_scale, head_dim_v),
        *(causal, attn_sink, descale_q, descale_k, backend),
    )
    if q.is_cuda and backend in ("auto", "flash_mla"):
        # FlashMLA marks an empty row by +inf; fused by Inductor, dropped when lse is unused.
        lse = torch.nan_to_num(lse, nan=float("nan"), posinf=-torch.inf, neginf=-torch.inf)
    return MLAOutput(out, lse)


_ARGUMENTS = (
    "Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits, float softmax_scale, "
    "SymInt head_dim_v, bool causal, Tensor? attn_sink, Tensor? descale_q, Tensor? descale_k, "
    "str backend"
)
_SCHEMA = f"mla_decode({_ARGUMENTS}) -> (Tensor, Tensor)"
_OUT_SCHEMA = f"mla_decode_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse) -> ()"


def _empty_output(q: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    out = torch.empty((batch, seqlen_q, heads, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty_strided(
        (batch, heads, seqlen_q),
        lse_strides(seqlen_q, heads),
        dtype=torch.float32,
        device=q.device,
    )
    return out, lse


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    check_layout(args, traced=True)
    return _empty_output(args[0], args[7])


def _out_fake(*args: Any) -> None:
    check_layout(args, traced=True)


def _dispatch(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    rows: Tensor | None,
    splits: Tensor | None,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool,
    attn_sink: Tensor | None,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    # Arguments by name, and no call that can be spared: tuples, slices and calls take as long as
    # the checks.
    # fmt: off
    recent = _decode_plan.recent
    if (
        recent.fits(q, kv_cache, block_table, cache_seqlens, rows, splits)
        and head_dim_v == recent.head_dim_v
        and backend == recent.backend
        and attn_sink is descale_q is descale_k is None
        and not (q.data_ptr() | kv_cache.data_ptr()) % 16
    ):
        plan = recent.plan
    else:
        plan = plan_decode((
            q, kv_cache, block_table, cache_seqlens, rows, splits, softmax_scale, head_dim_v,
            causal, attn_sink, descale_q, descale_k, backend,
        ))
    if plan.returns:
        if rows is None or CHECK_METADATA:
            given = (q, kv_cache, block_table, cache_seqlens, rows, splits)
            *_, cache_seqlens, rows, splits = _scheduled(plan, given)
        result: tuple[Tensor, Tensor] = plan.launch(
            q, kv_cache, block_table, cache_seqlens, rows, splits, softmax_scale, causal,
            attn_sink,
        )
        return result
    # fmt: on
    out, lse = _empty_output(q, head_dim_v)
    args = (q, kv_cache, block_table, cache_seqlens, rows, splits, softmax_scale, head_dim_v)
    _launch(plan, (*args, causal, attn_sink), out, lse)
    return out, lse


def _out_dispatch(*args: Any) -> None:
    _launch(plan_decode_out(args), args, args[13], args[14])


def _launch(plan: DecodePlan, args: Any, out: Tensor, lse: Tensor) -> None:
    if not plan.reads_keys:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if args[4] is None or CHECK_METADATA:
        args = _scheduled(plan, args)
    plan.launch(*args[:6], out, lse, softmax_scale=args[6], causal=args[8], attn_sink=args[9])


def _scheduled(plan: DecodePlan, args: Any) -> Any:
    """Return the arguments with a schedule where one is needed, or check the caller's."""
    if args[4] is not None:
        check_before_launch(args, plan.shape)
        return args
    if plan.backend != "flash_mla":
        return args
    q, cache_seqlens, shape = args[0], args[3], plan.shape
    # The kernel reads the table as far as the schedule goes: no further than it is wide.
    cache_seqlens = cache_seqlens.clamp(max=shape.max_pages * shape.page_size)
    parts = default_num_sm_parts(q.device, q.shape[2], q.shape[1])
    metadata = (
        cache_seqlens.new_empty((parts, METADATA_FIELDS)),
        cache_seqlens.new_empty((cache_seqlens.shape[0] + 1,)),
    )
    fill_metadata(cache_seqlens, *metadata, None, None, "flash_mla", "auto")
    return (*args[:3], cache_seqlens, *metadata, *args[6:])


_op = register(_SCHEMA, kernel=_dispatch, fake=_fake)
_out_op = register(_OUT_SCHEMA, kernel=_out_dispatch, fake=_out_fake)
