"""MLAAttention: DeepSeek's attention layer over the paged latent cache, absorbed for decode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mla_ops.cache import PagedKVCache
from mla_ops.errors import CacheCapacityError
from mla_ops.nn.absorb import absorb_q, expand_out, split_kv_b
from mla_ops.nn.config import MLAConfig
from mla_ops.nn.rope import RotaryEmbedding, apply_rope
from mla_ops.ops.decode import mla_decode
from mla_ops.ops.metadata import MLAMetadata
from mla_ops.shapes import ceil_div

__all__ = ["MLAAttention"]


class _LatentNorm(nn.Module):
    """RMSNorm with the roundings of DeepSeek's: the weight multiplies after the cast back."""

    def __init__(
        self, width: int, eps: float, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))
        self._eps = repr(eps)  # as text, see RotaryEmbedding

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + float(self._eps))
        return self.weight * normed.to(x.dtype)


class MLAAttention(nn.Module):
    """One layer of Multi-head Latent Attention; loads a checkpoint's layer with ``strict=True``.

    Row b of a batch is row b of the cache. Inference only: call it under ``torch.no_grad()`` or
    ``torch.inference_mode()``.

    Args:
        config: the layer's numbers.
        backend: of ``mla_decode``.
        dtype: dtype of the weights.
        device: where they lie.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self._softmax_scale = repr(config.softmax_scale)  # as text, see RotaryEmbedding
        heads, hidden = config.num_attention_heads, config.hidden_size

        def linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        rank, bias = config.q_lora_rank, config.attention_bias
        if rank is None:
            self.q_proj = linear(hidden, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = linear(hidden, rank, bias=bias)
            self.q_a_layernorm = _LatentNorm(rank, config.rms_norm_eps, dtype, device)
            self.q_b_proj = linear(rank, heads * config.qk_head_dim, bias=False)
        latent = config.kv_lora_rank
        self.kv_a_proj_with_mqa = linear(hidden, latent + config.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = _LatentNorm(latent, config.rms_norm_eps, dtype, device)
        self.kv_b_proj = linear(
            latent, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = linear(heads * config.v_head_dim, hidden, bias=bias)
        self.rotary = RotaryEmbedding(
            *(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling),
            config.max_position_embeddings,
            device=device,
        )

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the logits."""
        return float(self._softmax_scale)

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        cache: PagedKVCache,
        layer: int,
        slot_mapping: Tensor,
        metadata: MLAMetadata | tuple[Tensor, Tensor] | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Append the new tokens and attend from them to the cached latents (absorbed decode).

        Args:
            hidden_states: [B, S, hidden], dtype of the weights and the cache.
            positions: [B, S] integer positions; those of live rows are
                ``cache_seqlens - S + (0 .. S - 1)`` after the cache was advanced.
            cache: advanced by S tokens already; its lengths count the new tokens.
            layer: which pool of the cache.
            slot_mapping: [B * S] int64 from ``cache.advance_(B, S)``; -1 is not cached.
            metadata: ``mla_metadata`` of these lengths, computed once for all layers.
            indices: must be None (sparse decode is not served yet).

        Returns:
            [B, S, hidden]. A row that is not live holds o_proj of zeros.

        Raises:
            ValueError, TypeError: an argument does not fit.
            CacheCapacityError: B is beyond the rows of the cache.

        Capture: shapes, ``layer`` and the cache's addresses are constants of the graph; lengths,
            tables, slots and values may change between replays.
        Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
        """
        if indices is not None:
            raise ValueError(
                "MLAAttention: indices must be None, got a tensor (sparse decode is not "
                "implemented yet: call mla_decode without indices)"
            )
        batch = self._check(hidden_states, positions, cache)
        cos, sin = self.rotary(positions, hidden_states.dtype)
        q_nope, q_pe = self._queries(hidden_states, cos, sin)
        kv_c, k_pe = self._latents(hidden_states, cos, sin)
        cache.append_(layer, kv_c.flatten(0, 1), k_pe.flatten(0, 1), slot_mapping)
        w_uk, w_uv = self._up_projections()
        out_latent, _ = mla_decode(
            torch.cat((absorb_q(q_nope, w_uk), q_pe), dim=-1),
            cache.kv_cache(layer),
            cache.block_table.narrow(0, 0, batch),
            cache.cache_seqlens.narrow(0, 0, batch),
            metadata,
            softmax_scale=self.softmax_scale,
            head_dim_v=self.config.kv_lora_rank,
            causal=True,
            backend=self.backend,
        )
        output: Tensor = self.o_proj(expand_out(out_latent, w_uv).flatten(2))
        return output

    def prefill(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        cache: PagedKVCache,
        layer: int,
        slot_mapping: Tensor,
        *,
        cached_tokens: int = 0,
    ) -> Tensor:
        """Append a prompt, or a chunk of one, and attend with expanded keys and values.

        A chunk after the first gathers and expands the first ``cached_tokens`` tokens of every
        row, whatever the rows' own lengths: B * cached_tokens rows of kv_b_proj, and a mask of
        B * S * (cached_tokens + S) booleans. The first chunk gathers nothing.

        Args:
            hidden_states: [B, S, hidden]; rows shorter than S are padded at their end.
            positions: [B, S] consecutive positions; ``positions[:, 0]`` is the number of tokens
                the row has in the cache before this chunk, 0 for padding rows.
            cache: the rows' pages must be allocated; lengths are not read.
            layer: which pool of the cache.
            slot_mapping: [B * S] int64; -1 marks padding, which is not cached.
            cached_tokens: known on the host: at least the largest ``positions[:, 0]``. The
                output of a row with more cached tokens than that is NaN.

        Returns:
            [B, S, hidden]; undefined for padding tokens.

        Raises:
            ValueError, TypeError: an argument does not fit.
            CacheCapacityError: B or ``cached_tokens`` is beyond the cache.

        Capture: shapes, ``cached_tokens``, ``layer`` and addresses are constants of the graph.
        """
        self._check(hidden_states, positions, cache)
        cos, sin = self.rotary(positions, hidden_states.dtype)
        query = torch.cat(self._queries(hidden_states, cos, sin), dim=-1).transpose(1, 2)
        kv_c, k_pe = self._latents(hidden_states, cos, sin)
        cache.append_(layer, kv_c.flatten(0, 1), k_pe.flatten(0, 1), slot_mapping)
        # Padding comes last in its row and is never seen, but a weight of 0 times NaN is NaN.
        padding = (slot_mapping < 0).view(*positions.shape, 1)
        kv_c, k_pe = kv_c.masked_fill(padding, 0), k_pe.masked_fill(padding, 0)
        first = positions.select(1, 0) if positions.shape[1] else positions.sum(1)
        mask = None
        if cached_tokens > 0:
            seen, latents, ropes = self._cached(cache, layer, first, cached_tokens)
            mask = _chunk_mask(seen, positions.shape[1])
            kv_c, k_pe = torch.cat((latents, kv_c), dim=1), torch.cat((ropes, k_pe), dim=1)
        key, value = self._expand(kv_c, k_pe)
        result = scaled_dot_product_attention(
            *(query, key, value, mask), is_causal=mask is None, scale=self.softmax_scale
        )
        output: Tensor = self.o_proj(result.transpose(1, 2).flatten(2))
        unserved = (first > cached_tokens).view(-1, 1, 1)
        return output.masked_fill(unserved, float("nan"))

    def _queries(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q_nope [B, S, H, nope] and the rotated q_pe [B, S, H, rope]."""
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        q_nope, q_pe = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return q_nope, apply_rope(q_pe, cos, sin, interleaved=config.rope_interleave)

    def _latents(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is cached of each token: kv_c [B, S, latent] and k_pe [B, S, rope]."""
        config = self.config
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        kv_c, k_pe = compressed.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        k_pe = apply_rope(k_pe, cos, sin, interleaved=config.rope_interleave)
        return self.kv_a_layernorm(kv_c), k_pe

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        config = self.config
        return split_kv_b(
            *(self.kv_b_proj.weight, config.num_attention_heads),
            *(config.qk_nope_head_dim, config.v_head_dim),
        )

    def _expand(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B, H, T, nope + rope] and values [B, H, T, v] of latents [B, T, latent]."""
        config = self.config
        widths = (config.qk_nope_head_dim, config.v_head_dim)
        kv = self.kv_b_proj(kv_c).unflatten(-1, (config.num_attention_heads, sum(widths)))
        k_nope, value = kv.split(widths, dim=-1)
        shared = k_pe.unsqueeze(2).expand(-1, -1, config.num_attention_heads, -1)
        key = torch.cat((k_nope, shared), dim=-1)
        return key.transpose(1, 2), value.transpose(1, 2)

    def _cached(
        self, cache: PagedKVCache, layer: int, first: Tensor, cached_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return which of the first tokens each row has [B, T], their latents and ropes."""
        pages, max_pages = ceil_div(cached_tokens, cache.page_size), cache.block_table.shape[1]
        if pages > max_pages:
            raise CacheCapacityError(
                f"MLAAttention: cached_tokens must be at most {max_pages * cache.page_size}, got "
                f"{cached_tokens} (raise max_seq_len of the cache)"
            )
        pool = cache.kv_cache(layer).squeeze(2)  # [N, P, D]
        table = cache.block_table.narrow(0, 0, first.shape[0]).narrow(1, 0, pages)
        exists = (table >= 0) & (table < pool.shape[0])
        rows = pool.index_select(0, torch.where(exists, table, 0).flatten())
        rows = rows.view(-1, pages * cache.page_size, pool.shape[2])  # [B, T, D]
        offset = torch.arange(pages * cache.page_size, device=first.device)
        seen = exists.repeat_interleave(cache.page_size, dim=1) & (offset < first.unsqueeze(1))
        rows = torch.where(seen.unsqueeze(-1), rows, 0)
        config = self.config
        latents, ropes = rows.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        return seen, latents, ropes

    def _check(self, hidden_states: Tensor, positions: Tensor, cache: PagedKVCache) -> int:
        """Refuse arguments that would broadcast or overrun; return B."""
        hidden = self.config.hidden_size
        if hidden_states.dim() != 3 or hidden_states.shape[2] != hidden:
            raise ValueError(
                f"MLAAttention: hidden_states must be [B, S, {hidden}], got shape "
                f"{tuple(hidden_states.shape)} (add the sequence dimension)"
            )
        batch, seqlen_q, _ = hidden_states.shape
        if tuple(positions.shape) != (batch, seqlen_q):
            raise ValueError(
                f"MLAAttention: positions must be [B, S] = {(batch, seqlen_q)}, got shape "
                f"{tuple(positions.shape)} (one position per token)"
            )
        if batch > cache.max_batch_size:
            raise CacheCapacityError(
                f"MLAAttention: hidden_states must be of at most max_batch_size = "
                f"{cache.max_batch_size} rows, got {batch} (raise max_batch_size of the cache)"
            )
        return batch


def _chunk_mask(seen: Tensor, seqlen_q: int) -> Tensor:
    """Return [B, 1, S, T + S]: the cached tokens a row has, and the chunk's up to the query."""
    within = torch.ones((seqlen_q, seqlen_q), dtype=torch.bool, device=seen.device).tril()
    cached = seen.unsqueeze(1).unsqueeze(1).expand(-1, -1, seqlen_q, -1)
    return torch.cat((cached, within.expand(seen.shape[0], 1, -1, -1)), dim=-1)
