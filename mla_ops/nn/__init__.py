"""MLA layers over the operators: absorbed weights, RoPE, and DeepSeek's attention."""

from __future__ import annotations

from mla_ops.nn.absorb import absorb_q, expand_out, expand_wide_out, split_kv_b
from mla_ops.nn.attention import MLAAttention
from mla_ops.nn.config import MLAConfig
from mla_ops.nn.rope import RotaryEmbedding, apply_rope, inverse_frequencies, yarn_mscale

__all__ = [
    "MLAAttention",
    "MLAConfig",
    "RotaryEmbedding",
    "absorb_q",
    "apply_rope",
    "expand_out",
    "expand_wide_out",
    "inverse_frequencies",
    "split_kv_b",
    "yarn_mscale",
]
