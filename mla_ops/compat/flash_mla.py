"""Drop-in for ``import flash_mla``, in both generations of its API, traced without a break.

``import mla_ops.compat.flash_mla as flash_mla`` keeps FlashMLA's signatures, defaults and
conventions (an empty row's lse is +inf, the softmax scale defaults to ``q.shape[-1] ** -0.5``).
What differs: nothing is filled lazily. The object of ``get_mla_metadata()`` holds no state; each
decode with it plans for the lengths of that moment, so it cannot go stale.

Source: FlashMLA's ``flash_mla/flash_mla_interface.py`` of 2025 (tensors) and 2026 (object), and
that of sgl-flash-mla 1.0.0, which adds ``use_legacy``, ``has_legacy`` and planning apart.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from mla_ops.ops.decode import mla_decode
from mla_ops.ops.metadata import MLAMetadata, mla_metadata

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]


class FlashMLASchedMeta:
    """What ``get_mla_metadata()`` returns in the 2026 API; stateless here.

    Tensors that a caller hangs on it are ignored: each decode plans anew.
    """


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Tensor | None]:
    """Plan a decode (2025 API, with arguments) or return a stateless token (2026 API, without).

    Args:
        cache_seqlens: [B] int32 tokens per sequence.
        num_q_tokens_per_head_k: ``S * num_heads_q // num_heads_k``.
        num_heads_k: KV heads.
        num_heads_q: query heads; only sparse decodes need it.
        is_fp8_kvcache: not served yet.
        topk: keys per query of a sparse decode; not served yet.

    Returns:
        ``(tile_scheduler_metadata [T, 8], num_splits [B + 1])``, or ``(FlashMLASchedMeta, None)``.

    Raises:
        NotImplementedError: for FP8 caches and sparse decodes.
    """
    _refuse("get_mla_metadata", is_fp8_kvcache=is_fp8_kvcache, topk=topk)
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    if num_q_tokens_per_head_k is None:
        raise TypeError(
            "get_mla_metadata: num_q_tokens_per_head_k must be an int, got None "
            "(pass seqlen_q * num_heads_q // num_heads_k)"
        )
    return mla_metadata(
        cache_seqlens,
        num_heads_q=num_q_tokens_per_head_k * num_heads_k,
        num_heads_k=num_heads_k,
    )


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plan a decode apart from it, as sgl-flash-mla does: ``get_mla_metadata`` with arguments.

    Args:
        seqlens_k: [B] int32 tokens per sequence.
        num_q_tokens_per_head_k: ``S * num_heads_q // num_heads_k``.
        h_k: KV heads.
        h_q: query heads; only sparse decodes need it.
        is_fp8_kvcache: not served yet.
        topk: keys per query of a sparse decode; not served yet.
        use_legacy: which of its kernels FlashMLA plans for; without meaning here.

    Returns:
        ``(tile_scheduler_metadata [T, 8], num_splits [B + 1])``, both int32.

    Raises:
        NotImplementedError: for FP8 caches and sparse decodes.
    """
    _refuse("get_mla_decoding_metadata", is_fp8_kvcache=is_fp8_kvcache, topk=topk)
    return mla_metadata(seqlens_k, num_heads_q=num_q_tokens_per_head_k * h_k, num_heads_k=h_k)


def has_legacy() -> bool:
    """Tell that dense decodes are served, as FlashMLA's legacy kernels do: always."""
    return True


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor | FlashMLASchedMeta,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode like FlashMLA's function of that name.

    Args:
        q: [B, S, H, D].
        k_cache: [N, P, 1, D].
        block_table: [B, M] int32.
        cache_seqlens: [B] int32.
        head_dim_v: V.
        tile_scheduler_metadata: tensor [T, 8] with ``num_splits`` (2025 API), or the object of
            ``get_mla_metadata()`` (2026 API): then this call plans for the present lengths.
        num_splits: [B + 1] int32, or None with the object.
        softmax_scale: factor of the logits; None means ``D ** -0.5``, which is wrong for YaRN
            models: pass the model's.
        causal: bottom-right causal mask.
        is_fp8_kvcache: not served yet.
        indices: sparse decode; not served yet.
        attn_sink: [H] float32.
        extra_k_cache: sparse decode; not served yet.
        extra_indices_in_kvcache: sparse decode; not served yet.
        topk_length: sparse decode; not served yet.
        extra_topk_length: sparse decode; not served yet.
        enable_batch_invariant: not served yet.
        use_legacy: which of its kernels FlashMLA takes; without meaning here.
        kv_format: sparse decode; not served yet.
        descale_q: FP8; not served yet.
        descale_k: FP8; not served yet.

    Returns:
        out [B, S, H, V] and lse [B, H, S] float32; an empty row is out 0, lse +inf as FlashMLA
        writes it.

    Raises:
        NotImplementedError: for what is not served, by name.
        ValueError, TypeError: as ``mla_ops.mla_decode``.
    """
    _refuse(
        "flash_mla_with_kvcache",
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        enable_batch_invariant=enable_batch_invariant,
        kv_format=kv_format,
        descale_q=descale_q,
        descale_k=descale_k,
    )
    if block_table is None or cache_seqlens is None:
        name = "block_table" if block_table is None else "cache_seqlens"
        raise TypeError(
            f"flash_mla_with_kvcache: {name} must be a tensor, got None (dense decodes need it)"
        )
    if isinstance(tile_scheduler_metadata, Tensor):
        if num_splits is None:
            raise TypeError(
                "flash_mla_with_kvcache: num_splits must be a tensor beside tensor metadata, got "
                "None (pass both results of get_mla_metadata)"
            )
        metadata = MLAMetadata(tile_scheduler_metadata, num_splits)
    else:
        metadata = mla_metadata(cache_seqlens, num_heads_q=q.shape[2], seqlen_q=q.shape[1])
    out, lse = mla_decode(
        *(q, k_cache, block_table, cache_seqlens, metadata),
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        head_dim_v=head_dim_v,
        causal=causal,
        attn_sink=attn_sink,
    )
    return out, torch.nan_to_num(lse, nan=float("nan"), posinf=torch.inf, neginf=torch.inf)


def _refuse(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{function}: {name} must be left at its default, got a value "
                "(mla_ops serves dense decodes of bf16 and fp16 caches so far)"
            )


def flash_mla_sparse_fwd(*args: Any, **kwargs: Any) -> NoReturn:
    """Sparse prefill is not served yet."""
    _not_served("flash_mla_sparse_fwd")


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Prefill with expanded keys is not served: use a prefill kernel."""
    _not_served("flash_attn_varlen_func")


def flash_attn_varlen_qkvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Prefill with expanded keys is not served: use a prefill kernel."""
    _not_served("flash_attn_varlen_qkvpacked_func")


def flash_attn_varlen_kvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Prefill with expanded keys is not served: use a prefill kernel."""
    _not_served("flash_attn_varlen_kvpacked_func")


class _NotServed:
    """Stands for a module of the package; whatever is taken from it raises by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        # Copying, pickling and inspection ask for dunders and must be told they are absent.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _not_served(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _not_served(self._name)


fused_norm_rope_attn_rope_cast = _NotServed("fused_norm_rope_attn_rope_cast")


def _not_served(function: str) -> NoReturn:
    raise NotImplementedError(
        f"{function}: mla_ops.compat.flash_mla serves get_mla_metadata and "
        "flash_mla_with_kvcache, not this function (import it from flash_mla)"
    )
