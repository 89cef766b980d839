"""A small DeepSeek-style decoder with seeded random weights, for the demo and the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import torch
from torch import Tensor, nn

from mla_ops.cache import MLAMetadataBuffers, PagedKVCache
from mla_ops.nn import MLAAttention, MLAConfig
from mla_ops.ops.metadata import MLAMetadata

__all__ = ["VOCABULARY", "DemoModel", "demo_config", "read_prompts"]

# Bytes: the tokenizer is bytes(text).
VOCABULARY = 256
PAD = 0
# The dimensions of one attention layer that a CPU decodes in milliseconds; the cache rows are
# those of DeepSeek (512 + 64), so that every backend serves it.
SMALL = MLAConfig(
    hidden_size=512,
    num_attention_heads=16,
    q_lora_rank=192,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
)


def demo_config(preset: str) -> MLAConfig:
    """Return the attention layer of ``--preset``: "small" or a published model.

    Raises:
        ValueError: no such preset.
    """
    return SMALL if preset == "small" else MLAConfig.preset(preset)


def read_prompts(count: int) -> list[str]:
    """Return ``count`` prompts of those this package ships, again from the start if need be."""
    text = resources.files("mla_ops.cli").joinpath("prompts.txt").read_text(encoding="ascii")
    lines = text.splitlines()
    return [lines[index % len(lines)] for index in range(count)]


class _MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class _Layer(nn.Module):
    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = MLAAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _MLP(config.hidden_size, 2 * config.hidden_size)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cache: PagedKVCache,
        index: int,
        slot_mapping: Tensor,
        metadata: MLAMetadata | None,
    ) -> Tensor:
        """Decode with the step's metadata; prefill, which has none, without."""
        normed = self.input_layernorm(hidden)
        place = (positions, cache, index, slot_mapping)
        if metadata is None:
            hidden = hidden + self.self_attn.prefill(normed, *place)
        else:
            hidden = hidden + self.self_attn(normed, *place, metadata)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class DemoModel(nn.Module):
    """Embedding, N layers, norm and head over a paged cache it owns, like an engine's runner.

    ``forward`` is the decode step: it reads the tokens of the last step from a buffer and writes
    the next ones there, so that nothing but fixed addresses crosses its border.

    Args:
        config: the attention layer.
        num_layers: layers.
        batch_size: sequences.
        max_seq_len: tokens a sequence can grow to.
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
        batch_size: int,
        max_seq_len: int,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.embed_tokens = nn.Embedding(VOCABULARY, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        self._randomize(seed)
        self.to(device=device, dtype=dtype).requires_grad_(False)
        self.cache = PagedKVCache(
            *(num_layers, batch_size, max_seq_len),
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            dtype=dtype,
            device=device,
        )
        self.metadata = MLAMetadataBuffers(
            batch_size, num_heads_q=config.num_attention_heads, device=device
        )
        tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.register_buffer("tokens", tokens, persistent=False)

    @property
    def pool_bytes(self) -> int:
        """Bytes of one layer's pool."""
        pool = self.cache.kv_cache(0)
        return pool.numel() * pool.element_size()

    def forward(self) -> tuple[Tensor, Tensor]:
        """Decode one token of every sequence.

        Returns:
            tokens [B] and the logits [B, 256] they are the largest of.
        """
        slot_mapping = self.cache.advance_(self.batch_size)
        lengths = self.cache.cache_seqlens
        metadata = self.metadata.update(lengths)
        positions = (lengths - 1).clamp(min=0).unsqueeze(1)
        hidden = self.embed_tokens(self.tokens).unsqueeze(1)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, self.cache, index, slot_mapping, metadata)
        return self._emit(hidden.squeeze(1))

    def prefill(self, prompts: Sequence[str]) -> None:
        """Start over: fill an empty cache with one prompt a row and choose the first tokens."""
        ids = [torch.tensor(list(prompt.encode())) for prompt in prompts]
        device = self.tokens.device
        lengths = torch.tensor([len(row) for row in ids], device=device)
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD).to(device)
        width = padded.shape[1]
        self.cache.reset()
        for row in range(self.batch_size):
            self.cache.allocate(row, self.cache.max_seq_len)
        positions = torch.arange(width, device=device).expand_as(padded)
        slot_mapping = self.cache.advance_(self.batch_size, width)
        # Every row was advanced by the longest prompt; shorter ones end where they end.
        self.cache.cache_seqlens.copy_(lengths)
        outside = (positions >= lengths.unsqueeze(1)).flatten()
        slot_mapping = slot_mapping.masked_fill(outside, -1)
        hidden = self.embed_tokens(padded)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, self.cache, index, slot_mapping, None)
        rows = torch.arange(self.batch_size, device=device)
        self._emit(hidden[rows, lengths - 1])

    def _emit(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.norm(hidden))
        tokens = logits.argmax(-1)
        self.tokens.copy_(tokens)
        return tokens, logits

    def _randomize(self, seed: int) -> None:
        """Draw every matrix on the CPU, so that one seed means one model on any device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    scale = 1.0 if parameter.shape[0] == VOCABULARY else parameter.shape[1] ** -0.5
                    parameter.normal_(std=scale, generator=generator)
