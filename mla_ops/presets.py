"""Published MLA models: the dimensions that decide kernels, layers and softmax scales.

Source: each model's config.json on the Hugging Face hub; ``softmax_scale`` follows from it
(``qk_head_dim ** -0.5``, times YaRN's ``mscale ** 2`` where the model scales its RoPE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True)
class Preset:
    """One published model's MLA dimensions, in the names of DeepSeek's config."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads_q: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_position_embeddings: int = 4096

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the logits: 0.135234 for DeepSeek-V3, not ``576 ** -0.5``."""
        scale = 1.0 / math.sqrt(self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.rope_factor > 1.0 and self.mscale_all_dim > 0.0:
            scale *= (0.1 * self.mscale_all_dim * math.log(self.rope_factor) + 1.0) ** 2
        return scale

    @property
    def head_dim(self) -> int:
        """Return D, the width of a cached token: latent + rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "deepseek-v2-lite",
            *(2048, 27, 16, None, 512, 128, 64, 128),
            rope_factor=40.0,
            mscale_all_dim=0.707,
        ),
        Preset(
            "deepseek-v2",
            *(5120, 60, 128, 1536, 512, 128, 64, 128),
            rope_factor=40.0,
            mscale_all_dim=1.0,
        ),
        Preset(
            "deepseek-v3",
            *(7168, 61, 128, 1536, 512, 128, 64, 128),
            rope_factor=40.0,
            mscale_all_dim=1.0,
        ),
        Preset(
            "kimi-k2",
            *(7168, 61, 64, 1536, 512, 128, 64, 128),
            rope_theta=50000.0,
            rope_factor=32.0,
            mscale_all_dim=1.0,
        ),
        Preset("glm-4.7-flash", 2048, 47, 20, 768, 512, 192, 64, 256, rope_theta=1e6),
        Preset("glm-5", 6144, 78, 64, 2048, 512, 192, 64, 256, rope_theta=1e6),
        Preset("minicpm3-4b", 2560, 62, 40, 768, 256, 64, 32, 64),
        Preset("longcat-flash", 6144, 56, 64, 1536, 512, 128, 64, 128, rope_theta=1e7),
        Preset("youtu-llm-2b", 2048, 32, 16, 1536, 512, 128, 64, 128, rope_theta=1.6e6),
    )
}
