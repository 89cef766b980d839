"""append_kv_: write new tokens' latents and ropes into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.formats import DENSE_DTYPES
from mla_ops.ops._library import refuse_shared_memory, register
from mla_ops.ops._selection import device_kernel
from mla_ops.shapes import has_packed_rows

__all__ = ["append_kv_"]


def append_kv_(
    kv_cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    *,
    descale_k: Tensor | None = None,
) -> None:
    """Write ``cat(kv_c, k_pe)`` of every token into its slot of ``kv_cache``, in place.

    Args:
        kv_cache: [N, P, 1, D] pages, mutated; any page and row strides, last stride 1.
        kv_c: [n, latent] normalised latents, dtype of ``kv_cache``, last stride 1.
        k_pe: [n, rope] rotated rope keys, dtype of ``kv_cache``; latent + rope = D.
        slot_mapping: [n] int64, page * P + offset; a slot outside ``[0, N * P)`` is skipped.
            Two tokens must not share a slot.
        descale_k: float32 [1], for FP8 caches (not served yet).

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was written.

    Capture: addresses and shapes are constants of the graph; slots and tokens may change
        between replays.
    Source: vLLM's ``concat_and_cache_mla`` (the slot convention).
    """
    _op(kv_cache, kv_c, k_pe, slot_mapping, descale_k)


_SCHEMA = (
    "append_kv_(Tensor(a!) kv_cache, Tensor kv_c, Tensor k_pe, Tensor slot_mapping, "
    "Tensor? descale_k=None) -> ()"
)


def _check(
    kv_cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    descale_k: Tensor | None,
    *,
    traced: bool,
) -> None:
    if descale_k is not None or kv_cache.dtype not in DENSE_DTYPES:
        _refuse_fp8(kv_cache, descale_k)
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1 or not has_packed_rows(kv_cache):
        raise ValueError(
            "append_kv_: kv_cache must be [num_pages, page_size, 1, head_dim] with last stride 1, "
            f"got shape {tuple(kv_cache.shape)} with strides {kv_cache.stride()} "
            "(unsqueeze the head dimension)"
        )
    if slot_mapping.dtype != torch.int64:
        raise TypeError(
            f"append_kv_: slot_mapping must be int64, got {slot_mapping.dtype} (use .long())"
        )
    if slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(
            f"append_kv_: slot_mapping must be contiguous [n], got shape "
            f"{tuple(slot_mapping.shape)} (flatten it)"
        )
    _check_tokens(kv_cache, kv_c, k_pe, slot_mapping)
    _check_devices(kv_cache, kv_c, k_pe, slot_mapping)
    refuse_shared_memory(
        "append_kv_",
        [("kv_cache", kv_cache)],
        [("kv_c", kv_c), ("k_pe", k_pe), ("slot_mapping", slot_mapping)],
        traced=traced,
    )


def _check_tokens(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        if tensor.dtype != kv_cache.dtype:
            raise TypeError(
                f"append_kv_: {name} must be {kv_cache.dtype} like kv_cache, got {tensor.dtype} "
                "(convert it before the call)"
            )
        if tensor.dim() != 2 or tensor.shape[0] != slot_mapping.shape[0]:
            raise ValueError(
                f"append_kv_: {name} must be [n, width] with one row per slot "
                f"(n = {slot_mapping.shape[0]}), got shape {tuple(tensor.shape)} "
                "(flatten batch and sequence)"
            )
        if not has_packed_rows(tensor):
            raise ValueError(
                f"append_kv_: {name} must be last stride 1, got strides {tensor.stride()} "
                "(call .contiguous())"
            )
    if kv_c.shape[1] + k_pe.shape[1] != kv_cache.shape[3]:
        raise ValueError(
            f"append_kv_: kv_c must be of width head_dim - rope = "
            f"{kv_cache.shape[3] - k_pe.shape[1]}, got {kv_c.shape[1]} "
            "(latent + rope must equal kv_cache.shape[-1])"
        )


def _refuse_fp8(kv_cache: Tensor, descale_k: Tensor | None) -> None:
    if descale_k is not None:
        raise ValueError(
            "append_kv_: descale_k must be None, got a tensor (FP8 caches are not served yet)"
        )
    raise TypeError(
        "append_kv_: kv_cache must be float64, float32, bfloat16 or float16, got "
        f"{kv_cache.dtype} (FP8 caches are not served yet)"
    )


def _check_devices(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe), ("slot_mapping", slot_mapping)):
        if tensor.device != kv_cache.device:
            raise ValueError(
                f"append_kv_: {name} must be on {kv_cache.device} like kv_cache, got "
                f"{tensor.device} (move it)"
            )


def _fake(
    kv_cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    descale_k: Tensor | None = None,
) -> None:
    _check(kv_cache, kv_c, k_pe, slot_mapping, descale_k, traced=True)


def _dispatch(
    kv_cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    descale_k: Tensor | None = None,
) -> None:
    _check(kv_cache, kv_c, k_pe, slot_mapping, descale_k, traced=False)
    if slot_mapping.numel() and kv_cache.numel():
        device_kernel("append_kv_", kv_cache.device)(kv_cache, kv_c, k_pe, slot_mapping)


_op = register(_SCHEMA, kernel=_dispatch, fake=_fake)
