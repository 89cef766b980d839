"""Adapter to whatever flash_mla is importable: detection by capability, argument mapping only.

Three generations of the dense decode kernel are served. ``dense_decode_fwd`` (an operator of
sgl-flash-mla's ``flash_mla_legacy`` or of vLLM's ``_flashmla_C``, or pybind in
``flash_mla.cuda``) reads the schedule mla_ops writes. The 2025 Python API with two tensors reads
layouts of its own that changed between its releases, so there flash_mla plans on every call.

What its kernels do that the operators' contract does not say:

- A page outside ``[0, N)`` inside a length is read as zeros (TMA fills it): its keys count, with
  logit 0, instead of being absent. Nothing outside the pool is read.
- ``block_table`` is read as far as the schedule goes: lengths beyond ``M * P`` read past the
  row. ``MLA_OPS_CHECK_METADATA=1`` refuses them; ``PagedKVCache`` never makes them.
- The first table entry of an empty row is read too, so it has to be readable memory.
- Accumulators of ``[B + T, H * S, 512]`` float32 are allocated on every call.

Source: FlashMLA's ``csrc/api/dense_decode`` and ``csrc/sm90/decode/dense``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mla_ops._torch import bound_call, current_device, on_device_of, streaming_multiprocessors
from mla_ops.backends.flash_mla_api import find_flash_mla
from mla_ops.shapes import DecodeShape, lse_strides, num_sm_parts

__all__ = ["mla_decode", "mla_decode_out", "prepare_decode", "unavailable", "unsupported"]

_HEAD_DIM, _HEAD_DIM_V, _PAGE_SIZE = 576, 512, 64
# TMA takes addresses and strides in units of 16 bytes: 8 elements of 2 bytes.
_ALIGNMENT_BYTES, _ALIGNMENT = 16, 8


def unavailable(device: torch.device) -> list[str]:
    """Return why flash_mla cannot run on ``device``, each with the command that mends it."""
    return list(_unavailable(device))


@cache
def _unavailable(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (f"reads CUDA memory, the tensors are on {device.type} (use backend='auto')",)
    reasons = list(find_flash_mla().reasons)
    if not torch.cuda.is_available():
        reasons.append("torch finds no CUDA device (python -c 'import torch; torch.cuda.init()')")
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            reasons.append(
                f"its dense kernel is built for compute capability 9.0 (H100, H200), {device} has "
                f"{major}.{minor} (use backend='triton')"
            )
    return tuple(reasons)


def unsupported(shape: DecodeShape) -> list[str]:
    """Return why flash_mla cannot serve a decode of ``shape``."""
    reasons = []
    if shape.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"takes bfloat16 and float16, q is {shape.dtype}")
    if shape.out_dtype not in (None, shape.dtype):
        reasons.append(f"writes {shape.dtype} like q, out is {shape.out_dtype}")
    if (shape.head_dim, shape.head_dim_v) != (_HEAD_DIM, _HEAD_DIM_V):
        reasons.append(
            f"takes head_dim {_HEAD_DIM} with head_dim_v {_HEAD_DIM_V}, the call has "
            f"{shape.head_dim} and {shape.head_dim_v}"
        )
    if shape.page_size != _PAGE_SIZE:
        reasons.append(f"takes page_size {_PAGE_SIZE}, kv_cache has {shape.page_size}")
    if not shape.aligned_cache:
        reasons.append(
            "kv_cache must begin at a multiple of 16 bytes (slice the pool at whole pages)"
        )
    for name, stride in (("page", shape.page_stride), ("row", shape.row_stride)):
        if stride % _ALIGNMENT != 0 or stride < _HEAD_DIM:
            reasons.append(
                f"takes {name} strides of kv_cache that are multiples of {_ALIGNMENT} elements "
                f"and at least {_HEAD_DIM}, this one is {stride}"
            )
    return reasons


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float,
    causal: bool,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, 512] and lse [B, H, S] as flash_mla does: an empty row's lse is +inf.

    A q whose address or strides are no multiples of 16 bytes is copied first; flash_mla itself
    copies a q whose S and H dimensions cannot be merged into one.

    Raises:
        ValueError: kv_cache is misaligned, or the schedule has not exactly T rows.
    """
    api = find_flash_mla().api
    assert api is not None
    with on_device_of(q):
        if api.plan is None:
            _check_rows(q, tile_scheduler_metadata)
        else:
            rows = q.shape[1] * q.shape[2]
            tile_scheduler_metadata, num_splits = api.plan(cache_seqlens, rows)
        out, lse = api.decode(
            *(_aligned_q(q), _aligned_cache(kv_cache), _HEAD_DIM_V, cache_seqlens),
            *(_unit_stride(block_table), softmax_scale, causal),
            *(tile_scheduler_metadata, num_splits, *api.extra),
        )[:2]
        if api.plan is not None:
            # Releases of 2025 differ in what they write to a row without tokens.
            empty = cache_seqlens <= 0
            out.masked_fill_(empty[:, None, None, None], 0)
            lse.masked_fill_(empty[:, None, None], torch.inf)
        lse = _restrided(lse)
        if attn_sink is not None:
            _apply_sink(out, lse, attn_sink)
    return out, lse


def prepare_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    tile_scheduler_metadata: Tensor | None,
    attn_sink: Tensor | None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``mla_decode`` for tensors laid out like these; most take a call without detours.

    The detours depend on shapes, strides and alignment; to look for them takes 4 us a call.

    Raises:
        ValueError: the schedule has not exactly T rows.
    """
    api = find_flash_mla().api
    if api is None or api.plan is not None or attn_sink is not None:
        return mla_decode
    if _misaligned(q) or kv_cache.stride(2) % _ALIGNMENT or block_table.stride(1) != 1:
        return mla_decode
    if tile_scheduler_metadata is not None:
        _check_rows(q, tile_scheduler_metadata)
    decode, extra = bound_call(api.decode), api.extra
    strides, several = lse_strides(q.shape[1], q.shape[2]), torch.cuda.device_count() > 1

    def direct(
        q: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        tile_scheduler_metadata: Tensor,
        num_splits: Tensor,
        softmax_scale: float,
        causal: bool,
        attn_sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # fmt: off
        if several and q.get_device() != current_device():
            return mla_decode(
                q, kv_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits,
                softmax_scale, causal, attn_sink,
            )
        result = decode(
            q, kv_cache, _HEAD_DIM_V, cache_seqlens, block_table, softmax_scale, causal,
            tile_scheduler_metadata, num_splits, *extra,
        )
        # fmt: on
        lse = result[1]
        return result[0], lse if lse.stride() == strides else _restrided(lse)

    return direct


def mla_decode_out(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    attn_sink: Tensor | None,
) -> None:
    """Write ``mla_decode`` into the caller's tensors; an empty row's lse is -inf.

    flash_mla allocates its outputs: this costs a copy of out and one pass over lse.
    """
    result, raw_lse = mla_decode(
        *(q, kv_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits),
        *(softmax_scale, causal, attn_sink),
    )
    with on_device_of(q):
        out.copy_(result)
        lse.copy_(raw_lse)
        torch.nan_to_num_(lse, nan=float("nan"), posinf=-torch.inf, neginf=-torch.inf)


@cache
def _schedule_rows(device: torch.device, heads: int, seqlen_q: int) -> int:
    multiprocessors = streaming_multiprocessors(device)
    return num_sm_parts(multiprocessors, num_heads_q=heads, seqlen_q=seqlen_q)


def _check_rows(q: Tensor, tile_scheduler_metadata: Tensor) -> None:
    _, seqlen_q, heads, _ = q.shape
    rows = _schedule_rows(q.device, heads, seqlen_q)
    if tile_scheduler_metadata.shape[0] != rows:
        raise ValueError(
            f"mla_decode: tile_scheduler_metadata must be of exactly {rows} rows for flash_mla "
            f"with num_heads_q={heads}, seqlen_q={seqlen_q}, got "
            f"{tile_scheduler_metadata.shape[0]} (leave num_sm_parts at None)"
        )


def _misaligned(q: Tensor) -> bool:
    batch, row, head, _ = q.stride()
    return (batch | row | head) % _ALIGNMENT != 0 or q.data_ptr() % _ALIGNMENT_BYTES != 0


def _aligned_q(q: Tensor) -> Tensor:
    if _misaligned(q):
        # A clone: .contiguous() returns a contiguous q at a misaligned address as it is.
        return q.clone(memory_format=torch.contiguous_format)
    return q


def _aligned_cache(kv_cache: Tensor) -> Tensor:
    if kv_cache.data_ptr() % _ALIGNMENT_BYTES:
        raise ValueError(
            "mla_decode: kv_cache must begin at a multiple of 16 bytes for flash_mla, got address "
            f"{kv_cache.data_ptr():#x} (use backend='triton', or slice the pool at whole pages)"
        )
    page, row, head, _ = kv_cache.stride()
    if head % _ALIGNMENT:
        # The stride of the one KV head is never walked, but TMA checks it.
        return kv_cache.as_strided(kv_cache.shape, (page, row, row, 1))
    return kv_cache


def _unit_stride(block_table: Tensor) -> Tensor:
    if block_table.stride(1) != 1:
        # Only a table of one column gets here: flash_mla wants the stride spelled 1.
        return block_table.as_strided(block_table.shape, (block_table.stride(0), 1))
    return block_table


def _restrided(lse: Tensor) -> Tensor:
    """Return lse with the strides every backend has, copying only where they really differ."""
    _, heads, seqlen_q = lse.shape
    strides = lse_strides(seqlen_q, heads)
    if lse.stride() == strides:
        return lse
    return lse.new_empty_strided(lse.shape, strides).copy_(lse)


def _apply_sink(out: Tensor, lse: Tensor, attn_sink: Tensor) -> None:
    """Multiply out by exp(lse) / (exp(lse) + exp(sink)); the dense kernel has no sink."""
    share = torch.sigmoid(lse.transpose(1, 2) - attn_sink)  # [B, S, H]
    # An empty row is zeros and its +inf meets an infinite sink as NaN.
    out.mul_(torch.where(lse.transpose(1, 2) == torch.inf, 0.0, share)[..., None])
