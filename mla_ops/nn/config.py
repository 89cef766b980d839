"""MLAConfig: the numbers that define one attention layer, in the names of DeepSeek's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_ops.nn.rope import ROPE_TYPES, rope_type, yarn_mscale
from mla_ops.presets import PRESETS

__all__ = ["MLAConfig"]

# transformers' model types whose attention is DeepSeek-V3's, layer for layer. Others scale their
# latents (longcat_flash), gate their outputs (axk2), scale queries by position (mistral4) or
# select keys (deepseek_v32): loading their weights here would give wrong numbers.
MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "minicpm3",
    "sarvam_mla",
    "youtu",
)
# The layers of transformers build q_a_layernorm and kv_a_layernorm with this epsilon, whatever
# rms_norm_eps their config gives to the other norms.
TRANSFORMERS_LATENT_EPS = 1e-6
_UNSERVED_PRESETS = {
    "glm-5": "it attends to the keys an indexer selects",
    "longcat-flash": "it scales its latents by sqrt(hidden_size / rank)",
    "minicpm3-4b": "its longrope factors are in its own config: use from_transformers",
}


# Kimi-K2's YaRN ramp starts and ends at one rotation; every other preset ramps from 32 to 1.
_YARN_BETA_FAST = {"kimi-k2": 1.0}


@dataclass(frozen=True)
class MLAConfig:
    """One MLA layer.

    Args:
        hidden_size: width of the residual stream.
        num_attention_heads: H.
        q_lora_rank: width of the query latent; None for one dense q_proj.
        kv_lora_rank: width of the cached latent.
        qk_nope_head_dim: width of a key without its rope.
        qk_rope_head_dim: width of the shared rope key.
        v_head_dim: width of a value.
        rms_norm_eps: epsilon of q_a_layernorm and kv_a_layernorm.
        attention_bias: q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None, or a config's ``rope_scaling`` ("yarn", static "longrope").
        rope_interleave: rotated pairs are neighbours in the checkpoint, as DeepSeek's are.
        max_position_embeddings: context length.

    Raises:
        ValueError: a size is not positive, or the scaling is not served.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    rope_interleave: bool = True
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        for name in (
            *("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim"),
            *("qk_rope_head_dim", "v_head_dim", "max_position_embeddings"),
        ):
            _refuse_unless(getattr(self, name) >= 1, name, ">= 1", getattr(self, name), "count it")
        _refuse_unless(
            self.q_lora_rank is None or self.q_lora_rank >= 1,
            *("q_lora_rank", "None or >= 1", self.q_lora_rank, "None means one dense q_proj"),
        )
        _refuse_unless(
            self.qk_rope_head_dim % 2 == 0,
            *("qk_rope_head_dim", "even", self.qk_rope_head_dim, "RoPE rotates pairs"),
        )
        kind = rope_type(self.rope_scaling)
        _refuse_unless(
            kind in ROPE_TYPES,
            *("rope_scaling", f"None or one of {ROPE_TYPES}", repr(kind), "scale outside"),
        )
        needed = {"yarn": "factor", "longrope": "short_factor"}.get(kind)
        scaling = None if self.rope_scaling is None else dict(self.rope_scaling)
        _refuse_unless(
            needed is None or (scaling or {}).get(needed) is not None,
            *("rope_scaling", f"with {needed!r} for {kind}", scaling, "copy the model's dict"),
        )
        partial = (scaling or {}).get("partial_rotary_factor")
        _refuse_unless(
            partial in (None, 1, 1.0),
            *("partial_rotary_factor", "1", partial, "qk_rope_head_dim is rotated whole"),
        )
        object.__setattr__(self, "rope_scaling", scaling)

    @property
    def qk_head_dim(self) -> int:
        """Return the width of an expanded query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the logits: 0.135234 for DeepSeek-V3, not ``576 ** -0.5``."""
        scale: float = self.qk_head_dim**-0.5
        scaling = self.rope_scaling or {}
        mscale_all_dim = scaling.get("mscale_all_dim")
        if rope_type(scaling) != "default" and mscale_all_dim:
            mscale = yarn_mscale(scaling["factor"], mscale_all_dim)
            scale = scale * mscale * mscale
        return scale

    @classmethod
    def from_transformers(cls, config: Any) -> MLAConfig:
        """Read the attributes of a transformers config (or of any object that has them).

        Args:
            config: a config of one of ``MODEL_TYPES``; one without ``model_type`` is taken at
                its word. RoPE comes from ``rope_parameters`` (transformers 5) or from
                ``rope_theta`` and ``rope_scaling``.

        Raises:
            ValueError: the model's attention is not DeepSeek-V3's.
        """
        model_type = getattr(config, "model_type", None)
        _refuse_unless(
            model_type is None or model_type in MODEL_TYPES,
            *("model_type", f"one of {MODEL_TYPES}", repr(model_type)),
            "the attention of other models differs; if this one's does not, use MLAConfig(...)",
        )
        scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        scaling = dict(scaling or {})
        theta = scaling.pop("rope_theta", None) or getattr(config, "rope_theta", None)
        return cls(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            rms_norm_eps=TRANSFORMERS_LATENT_EPS,
            attention_bias=bool(getattr(config, "attention_bias", False)),
            rope_theta=10000.0 if theta is None else float(theta),
            rope_scaling=scaling or None,
            rope_interleave=bool(getattr(config, "rope_interleave", model_type != "minicpm3")),
            max_position_embeddings=config.max_position_embeddings,
        )

    @classmethod
    def preset(cls, name: str) -> MLAConfig:
        """Return the attention of a published model (``mla_ops.presets.PRESETS``).

        Raises:
            ValueError: no such preset, or its attention is more than its dimensions.
        """
        _refuse_unless(
            name in PRESETS, "preset", f"one of {tuple(PRESETS)}", repr(name), "build MLAConfig"
        )
        reason = _UNSERVED_PRESETS.get(name)
        _refuse_unless(
            reason is None, "preset", "a model with DeepSeek-V3's attention", repr(name), reason
        )
        preset = PRESETS[name]
        original = preset.original_max_position_embeddings
        yarn = {
            "rope_type": "yarn",
            "factor": preset.rope_factor,
            "beta_fast": _YARN_BETA_FAST.get(name, 32.0),
            "mscale": preset.mscale_all_dim,
            "mscale_all_dim": preset.mscale_all_dim,
            "original_max_position_embeddings": original,
        }
        return cls(
            hidden_size=preset.hidden_size,
            num_attention_heads=preset.num_heads_q,
            q_lora_rank=preset.q_lora_rank,
            kv_lora_rank=preset.kv_lora_rank,
            qk_nope_head_dim=preset.qk_nope_head_dim,
            qk_rope_head_dim=preset.qk_rope_head_dim,
            v_head_dim=preset.v_head_dim,
            rope_theta=preset.rope_theta,
            rope_scaling=yarn if preset.rope_factor > 1.0 else None,
            max_position_embeddings=int(original * preset.rope_factor),
        )


def _refuse_unless(ok: bool, argument: str, expected: str, actual: Any, fix: str | None) -> None:
    if not ok:
        raise ValueError(f"MLAConfig: {argument} must be {expected}, got {actual} ({fix})")
