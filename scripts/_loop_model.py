"""The model of decode_loop.py: DeepSeek attention layers over a paged cache, with taps.

A tap is what the float64 oracle needs of one layer: the queries, the new tokens and the result.
Experts are replaced by one dense SwiGLU of twice the hidden width: attention is what is tested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import mla_ops
from mla_ops.nn import MLAAttention, MLAConfig
from mla_ops.nn.absorb import absorb_q, expand_out

VOCABULARY = 1024
_EPS = 1e-6


class Tap(NamedTuple):
    """One layer's decode call of the last step."""

    q: Tensor  # [B, 1, H, D]
    kv_c: Tensor  # [B, latent]
    k_pe: Tensor  # [B, rope]
    out: Tensor  # [B, 1, H, V]
    lse: Tensor  # float32 [B, H, 1]


class TappedAttention(MLAAttention):
    """MLAAttention whose decode also returns its tap."""

    def decode(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache: mla_ops.PagedKVCache,
        layer: int,
        slot_mapping: Tensor,
        metadata: mla_ops.MLAMetadata,
    ) -> tuple[Tensor, Tap]:
        batch = hidden.shape[0]
        cos, sin = self.rotary(positions, hidden.dtype)
        q_nope, q_pe = self._queries(hidden, cos, sin)
        kv_c, k_pe = (part.flatten(0, 1) for part in self._latents(hidden, cos, sin))
        cache.append_(layer, kv_c, k_pe, slot_mapping)
        w_uk, w_uv = self._up_projections()
        q = torch.cat((absorb_q(q_nope, w_uk), q_pe), dim=-1)
        out, lse = mla_ops.mla_decode(
            *(q, cache.kv_cache(layer), cache.block_table.narrow(0, 0, batch)),
            *(cache.cache_seqlens.narrow(0, 0, batch), metadata),
            softmax_scale=self.softmax_scale,
            head_dim_v=self.config.kv_lora_rank,
        )
        return self.o_proj(expand_out(out, w_uv).flatten(2)), Tap(q, kv_c, k_pe, out, lse)


class _Norm(nn.Module):
    """RMSNorm; a float attribute would be a CPU input of a graph with dynamic shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, _EPS)


class _Layer(nn.Module):
    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_norm, self.output_norm = _Norm(width), _Norm(width)
        self.attention = TappedAttention(config)
        self.gate_and_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def mix(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_and_up(self.output_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)


class LoopModel(nn.Module):
    """The decode step over the leading rows of a paged cache that this module owns.

    The tokens of the last step are read from a buffer and the next ones written there: nothing
    but the number of rows crosses the border of the graph.

    Args:
        config: the attention layer.
        num_layers: layers; the first and the last are tapped.
        max_batch_size: rows, the largest captured batch.
        max_seq_len: tokens a row can grow to.
        num_pages: pages of every pool.
        seed: of the random weights.
        dtype: of weights and cache.
        device: where they lie.
    """

    tokens: Tensor

    def __init__(
        self,
        config: MLAConfig,
        *,
        num_layers: int,
        max_batch_size: int,
        max_seq_len: int,
        num_pages: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_layers = num_layers
        self.tapped = tuple(sorted({0, num_layers - 1}))
        with torch.device(device):
            self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
            self.layers = nn.ModuleList(_Layer(config) for _ in range(num_layers))
            self.norm = _Norm(config.hidden_size)
            self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                scale = 1.0 if parameter is self.embedding.weight else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=scale, generator=generator)
        self.to(dtype).requires_grad_(False)
        self.cache = mla_ops.PagedKVCache(
            *(num_layers, max_batch_size, max_seq_len),
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            num_pages=num_pages,
            dtype=dtype,
            device=device,
        )
        self.schedule = mla_ops.MLAMetadataBuffers(
            max_batch_size, num_heads_q=config.num_attention_heads, device=device
        )
        tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.register_buffer("tokens", tokens, persistent=False)

    def forward(self, batch_size: int) -> tuple[Tap, ...]:
        """Decode one token of each live row among the leading ``batch_size``."""
        slot_mapping = self.cache.advance_(batch_size)
        lengths = self.cache.cache_seqlens.narrow(0, 0, batch_size)
        metadata = self.schedule.update(lengths)
        positions = (lengths - 1).clamp(min=0).unsqueeze(1)
        tokens = self.tokens.narrow(0, 0, batch_size)
        hidden = self.embedding(tokens).unsqueeze(1)
        taps = []
        for index, layer in enumerate(self.layers):
            place = (positions, self.cache, index, slot_mapping, metadata)
            mixed, tap = layer.attention.decode(layer.input_norm(hidden), *place)
            hidden = layer.mix(hidden + mixed)
            if index in self.tapped:
                taps.append(tap)
        tokens.copy_(self.head(self.norm(hidden.squeeze(1))).argmax(-1))
        return tuple(taps)

    def prefill(self, row: int, prompt: Tensor) -> None:
        """Fill an allocated, empty row with ``prompt`` [n] and choose its first token; eager.

        Nothing is read back to the host.
        """
        tokens, page_size = prompt.shape[0], self.cache.page_size
        positions = torch.arange(tokens, device=prompt.device)
        pages = self.cache.block_table[row].long()[positions // page_size]
        slot_mapping = pages * page_size + positions % page_size
        hidden = self.embedding(prompt).unsqueeze(0)
        for index, layer in enumerate(self.layers):
            place = (positions.unsqueeze(0), self.cache, index, slot_mapping)
            hidden = hidden + layer.attention.prefill(layer.input_norm(hidden), *place)
            hidden = layer.mix(hidden)
        self.cache.cache_seqlens[row] = tokens
        self.tokens[row] = self.head(self.norm(hidden[0, -1])).argmax(-1)
