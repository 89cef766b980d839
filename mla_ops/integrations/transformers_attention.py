"""The three ways a patched attention module attends: paged latents, selected latents, expanded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mla_ops.integrations.transformers_layers import kv_b_weight
from mla_ops.integrations.transformers_pool import MLAStaticLayer
from mla_ops.nn.absorb import absorb_q, expand_out, expand_wide_out, split_kv_b
from mla_ops.ops.append import append_kv_
from mla_ops.ops.decode import mla_decode
from mla_ops.shapes import MAX_SEQLEN_Q

__all__ = ["expanded_attention", "paged_attention", "sparse_attention"]


def paged_attention(
    module: Any,
    query: Tensor,
    layer: MLAStaticLayer,
    latents: tuple[Tensor, Tensor],
    lengths: Tensor | None,
    scaling: float,
    indices: Tensor | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Append the new tokens without their padding, then attend to the rows' first tokens.

    Args:
        module: the attention module.
        query: [B, H, S, nope + rope].
        layer: the pool.
        latents: [B, 1, S, latent] and [B, 1, S, rope] of the new tokens.
        lengths: int32 [B, 1, 1, 1] tokens without padding, the new ones included; as int64: the
            same, and the cache was empty; None: no padding, and the cache was empty.
        scaling: factor of the logits.
        indices: must be None.
        s_aux: [H] sinks.

    Returns:
        [B, S, H, v].
    """
    batch, _, seqlen, _ = query.shape
    _check_lengths(lengths, indices, batch)
    if lengths is None:
        total = layer.cumulative_length.to(torch.int32).expand(batch).contiguous()
    else:
        total = lengths.reshape(batch).to(torch.int32).contiguous()
    steps = torch.arange(-seqlen, 0, device=total.device)
    _append(layer, latents, total.long().unsqueeze(1) + steps)
    if seqlen <= MAX_SEQLEN_Q:
        return _decode(module, query, layer, total, scaling, s_aux)
    if lengths is None:
        return expanded_attention(module, query, *latents, None, scaling, None, s_aux)
    new = torch.arange(seqlen, device=total.device)
    if lengths.dtype == torch.int64:
        # The chunk's own keys, at their padded places.
        pad = seqlen - total.view(-1, 1, 1, 1)
        visible = (new <= new.unsqueeze(1)) & (new >= pad)
        return expanded_attention(module, query, *latents, visible, scaling, None, s_aux)
    # The pool's keys, at their compacted places.
    places = torch.arange(layer.row_tokens, device=total.device)
    visible = places <= total.view(-1, 1, 1, 1) - seqlen + new.unsqueeze(1)
    cached = _cached(layer, batch, layer.row_tokens)
    return expanded_attention(module, query, *cached, visible, scaling, None, s_aux)


def _check_lengths(lengths: Tensor | None, indices: Tensor | None, batch: int) -> None:
    if indices is not None or (
        lengths is not None
        and (lengths.dtype not in (torch.int32, torch.int64) or lengths.numel() != batch)
    ):
        raise ValueError(
            "mla_ops: attention_mask must be the 2-D mask of a causal model, got a mask or a "
            f"selection made elsewhere ({None if lengths is None else tuple(lengths.shape)}; pass "
            "attention_mask [batch, tokens], zeros then ones)"
        )


def sparse_attention(
    module: Any,
    query: Tensor,
    layer: MLAStaticLayer,
    latents: tuple[Tensor, Tensor],
    visible: Tensor | None,
    scaling: float,
    indices: Tensor | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Append the new tokens at their padded positions, then attend to the selected ones.

    Args:
        module: the attention module.
        query: [B, H, S, nope + rope].
        layer: the pool.
        latents: [B, 1, S, latent] and [B, 1, S, rope] of the new tokens.
        visible: bool [B, 1, S, max_cache_len], True where a key may be seen.
        scaling: factor of the logits.
        indices: int32 [B, S, topk] selected positions; those not visible count as none.
        s_aux: [H] sinks.

    Returns:
        [B, S, H, v].
    """
    batch, _, seqlen, _ = query.shape
    if indices is None or visible is None or visible.dtype != torch.bool:
        raise ValueError(
            "mla_ops: sparse attention must come with indices and a boolean mask, got "
            f"{None if indices is None else tuple(indices.shape)} and "
            f"{None if visible is None else visible.dtype} (unpatch the model)"
        )
    steps = torch.arange(-seqlen, 0, device=query.device)
    _append(layer, latents, (layer.cumulative_length + steps).expand(batch, seqlen))
    if seqlen > MAX_SEQLEN_Q:
        cached = _cached(layer, batch, visible.shape[-1])
        return expanded_attention(module, query, *cached, visible, scaling, indices, s_aux)
    return _decode_selected(module, query, layer, visible, scaling, indices, s_aux)


def expanded_attention(
    module: Any,
    query: Tensor,
    kv_nope: Tensor,
    k_rot: Tensor,
    visible: Any,
    scaling: float,
    indices: Tensor | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Expand the latents with the model's own ``expand_kv`` and attend by SDPA.

    Args:
        module: the attention module.
        query: [B, H, S, nope + rope].
        kv_nope: [B, 1, T, latent].
        k_rot: [B, 1, T, rope].
        visible: bool or additive mask broadcastable to [B, H, S, T]; None is causal.
        scaling: factor of the logits.
        indices: [B, S, topk] selected keys, or None for all.
        s_aux: [H] sinks.

    Returns:
        [B, S, H, v].
    """
    keys, values = type(module).expand_kv(module, kv_nope, k_rot)
    if indices is not None or s_aux is not None:
        visible = _additive(visible, query, keys.shape[2])
    if indices is not None:
        chosen = torch.zeros_like(visible[:, 0], dtype=torch.bool)
        chosen = chosen.expand(query.shape[0], -1, -1).scatter(-1, indices.long(), True)
        visible = visible.masked_fill(~chosen.unsqueeze(1), torch.finfo(query.dtype).min)
    if s_aux is not None:
        # A sink is a key of logit s_aux without value.
        keys = nn.functional.pad(keys, (0, 0, 0, 1))
        values = nn.functional.pad(values, (0, 0, 0, 1))
        batch, heads, seqlen, _ = query.shape
        sink = s_aux.to(query.dtype).view(1, -1, 1, 1).expand(batch, -1, seqlen, -1)
        visible = torch.cat([visible.expand(batch, heads, seqlen, -1), sink], dim=-1)
    out: Tensor = sdpa_attention_forward(
        module, query, keys, values, visible, dropout=0.0, scaling=scaling
    )[0]
    return out


def _additive(visible: Any, query: Tensor, length: int) -> Any:
    """Return ``visible`` as a mask to add to the logits; None is causal."""
    if visible is None:
        seqlen = query.shape[2]
        visible = torch.ones((1, 1, seqlen, length), dtype=torch.bool, device=query.device)
        visible = visible.tril(length - seqlen)
    if visible.dtype != torch.bool:
        return visible
    floor = torch.finfo(query.dtype).min
    return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, floor)


def _append(layer: MLAStaticLayer, latents: tuple[Tensor, Tensor], places: Tensor) -> None:
    """Write the new tokens to ``places`` [B, S] of their rows; places outside are skipped."""
    batch, seqlen = places.shape
    rows = torch.arange(batch, device=places.device).unsqueeze(1) * layer.row_tokens
    fits = (places >= 0) & (places < layer.row_tokens)
    slots = torch.where(fits, rows + places, -1).reshape(-1)
    flat = [tensor.reshape(batch * seqlen, tensor.shape[-1]) for tensor in latents]
    kv_c, k_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in flat)
    append_kv_(layer.kv_cache, kv_c, k_pe, slots)


def _cached(layer: MLAStaticLayer, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """View the first tokens of the rows as latents and ropes, [B, 1, length, width]."""
    rows = layer.rows(batch).narrow(1, 0, length).unsqueeze(1)
    latent = layer.latent_dim
    return rows.narrow(-1, 0, latent), rows.narrow(-1, latent, rows.shape[-1] - latent)


def _up_projections(module: Any, heads: int) -> tuple[Tensor, Tensor]:
    return split_kv_b(kv_b_weight(module), heads, module.qk_nope_head_dim, module.v_head_dim)


def _absorbed(module: Any, query: Tensor, w_uk: Tensor) -> Tensor:
    """Return [B, S, H, latent + rope] queries for the cached rows."""
    query = query.transpose(1, 2)
    nope = module.qk_nope_head_dim
    rope = query.narrow(-1, nope, query.shape[-1] - nope)
    return torch.cat([absorb_q(query.narrow(-1, 0, nope), w_uk), rope], dim=-1)


def _decode(
    module: Any,
    query: Tensor,
    layer: MLAStaticLayer,
    lengths: Tensor,
    scaling: float,
    s_aux: Tensor | None,
) -> Tensor:
    batch, heads, _, _ = query.shape
    w_uk, w_uv = _up_projections(module, heads)
    return _expanded_decode(
        w_uv,
        _absorbed(module, query, w_uk),
        layer.kv_cache,
        layer.block_table.narrow(0, 0, batch),
        lengths,
        softmax_scale=scaling,
        head_dim_v=layer.latent_dim,
        attn_sink=None if s_aux is None else s_aux.float(),
    )


def _decode_selected(
    module: Any,
    query: Tensor,
    layer: MLAStaticLayer,
    visible: Tensor,
    scaling: float,
    indices: Tensor,
    s_aux: Tensor | None,
) -> Tensor:
    batch, heads, seqlen, _ = query.shape
    positions = indices.long()
    seen = visible[:, 0].expand(batch, -1, -1).gather(-1, positions)  # [B, S, topk]
    rows = torch.arange(batch, device=query.device).view(-1, 1, 1) * layer.row_tokens
    pages = torch.where(seen, rows + positions, -1).to(torch.int32)
    topk = pages.shape[-1]
    # Pages of one token: a selection is a block table, and page -1 counts as no key.
    pool = layer.kv_cache.view(-1, 1, 1, layer.kv_cache.shape[-1])
    w_uk, w_uv = _up_projections(module, heads)
    out = _expanded_decode(
        w_uv,
        _absorbed(module, query, w_uk).reshape(batch * seqlen, 1, heads, -1),
        pool,
        pages.view(batch * seqlen, topk),
        torch.full((batch * seqlen,), topk, dtype=torch.int32, device=query.device),
        softmax_scale=scaling,
        head_dim_v=layer.latent_dim,
        causal=False,
        attn_sink=None if s_aux is None else s_aux.float(),
    )
    return out.view(batch, seqlen, heads, -1)


def _expanded_decode(
    w_uv: Tensor, q: Tensor, *args: Any, head_dim_v: int, **kwargs: Any
) -> Tensor:
    """Call ``mla_decode`` and expand its latents, which stay float32 if ``q`` has 16 bits.

    No schedule is passed: flash_mla, the one backend that reads it, writes no float32.
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        latents = mla_decode(q, *args, head_dim_v=head_dim_v, **kwargs).out
        return expand_out(latents, w_uv)
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty((batch, seqlen, heads, head_dim_v), dtype=torch.float32)
    lse = q.new_empty((batch, heads, seqlen), dtype=torch.float32)
    mla_decode(q, *args, head_dim_v=head_dim_v, **kwargs, out=out, lse=lse)
    return expand_wide_out(out, w_uv)
