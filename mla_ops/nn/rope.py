"""Rotary position embedding as DeepSeek's models use it: interleaved or half-split, YaRN.

Everything is a pure function of positions. The numbers equal those of transformers bit for bit
in eager mode: angles in float32, cosines rounded to the dtype of the tensor that is rotated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RotaryEmbedding", "apply_rope", "inverse_frequencies", "rope_type", "yarn_mscale"]

ROPE_TYPES = ("default", "yarn", "longrope")


def rope_type(rope_scaling: Mapping[str, Any] | None) -> str:
    """Return the kind of scaling; older configs call the key ``type``."""
    scaling = rope_scaling or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature ``0.1 * mscale * ln(factor) + 1``."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(
    rope_dim: int,
    rope_theta: float,
    rope_scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int = 4096,
) -> tuple[Tensor, float]:
    """Return the angle a position adds to each pair, and the factor of cosine and sine.

    Args:
        rope_dim: width of the rotated part of a head.
        rope_theta: base of the frequencies.
        rope_scaling: None, or ``rope_scaling`` of a config: "yarn", or "longrope" where the
            model never leaves its original context.
        max_position_embeddings: the model's context, the default of
            ``original_max_position_embeddings``.

    Returns:
        ``(inv_freq [rope_dim / 2] float32 on CPU, attention_factor)``.

    Raises:
        ValueError: this kind of scaling is not served.

    Source: YaRN (arXiv 2309.00071), DeepSeek-V3's and transformers' implementation.
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim
    pair_theta = rope_theta**exponents
    kind = rope_type(rope_scaling)
    if kind == "default" or rope_scaling is None:
        return 1.0 / pair_theta, 1.0
    if kind == "yarn":
        blend = _yarn_blend(rope_dim, rope_theta, rope_scaling, max_position_embeddings)
        slowed = 1.0 / (rope_scaling["factor"] * pair_theta)
        return slowed * (1 - blend) + (1.0 / pair_theta) * blend, _yarn_factor(rope_scaling)
    if kind == "longrope":
        return _longrope(pair_theta, rope_scaling, max_position_embeddings)
    raise ValueError(
        f"inverse_frequencies: rope_scaling must be None or one of {ROPE_TYPES}, got {kind!r} "
        "(no published MLA model uses another)"
    )


def _yarn_blend(
    rope_dim: int, rope_theta: float, rope_scaling: Mapping[str, Any], max_positions: int
) -> Tensor:
    """Return 1 where a pair keeps its frequency, 0 where it is slowed, a ramp in between."""
    original = rope_scaling.get("original_max_position_embeddings") or max_positions

    def pair_of(rotations: float) -> float:
        wavelength = original / (rotations * 2 * math.pi)
        return (rope_dim * math.log(wavelength)) / (2 * math.log(rope_theta))

    low = pair_of(rope_scaling.get("beta_fast") or 32)
    high = pair_of(rope_scaling.get("beta_slow") or 1)
    if rope_scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((pairs - low) / (high - low)).clamp(0, 1)


def _yarn_factor(rope_scaling: Mapping[str, Any]) -> float:
    given = rope_scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = rope_scaling["factor"]
    mscale, mscale_all_dim = rope_scaling.get("mscale"), rope_scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def _longrope(
    pair_theta: Tensor, rope_scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    """Apply the short factors; the long ones hold beyond the original context only."""
    original = rope_scaling.get("original_max_position_embeddings") or max_positions
    if max_positions > original:
        raise ValueError(
            "inverse_frequencies: max_position_embeddings must be at most "
            f"original_max_position_embeddings = {original} with longrope, got {max_positions} "
            "(frequencies that depend on the length would make cached keys stale)"
        )
    factors = torch.tensor(rope_scaling["short_factor"], dtype=torch.float32, device="cpu")
    attention_factor = rope_scaling.get("attention_factor")
    if attention_factor is None:
        factor = rope_scaling.get("factor") or 1.0
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    return 1.0 / (factors * pair_theta), float(attention_factor)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs of ``x``.

    Args:
        x: [..., rope].
        cos: broadcastable to [..., rope / 2], in the dtype of ``x``.
        sin: like ``cos``.
        interleaved: pairs are neighbours (0, 1), (2, 3), ... as in DeepSeek's checkpoints;
            otherwise (0, rope / 2), (1, rope / 2 + 1), ...

    Returns:
        [..., rope] with the first members of the pairs in the first half, whichever layout ``x``
        has. Queries and keys are laid out alike, so their products do not depend on it.

    Source: transformers' ``apply_rotary_pos_emb`` and ``apply_rotary_pos_emb_interleave``.
    """
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotaryEmbedding(nn.Module):
    """Cosine and sine of positions, computed in the graph from rope / 2 frequencies.

    Args:
        rope_dim: qk_rope_head_dim.
        rope_theta: base of the frequencies.
        rope_scaling: see ``inverse_frequencies``.
        max_position_embeddings: see ``inverse_frequencies``.
        device: where positions will lie.
    """

    inv_freq: Tensor

    def __init__(
        self,
        rope_dim: int,
        rope_theta: float,
        rope_scaling: Mapping[str, Any] | None = None,
        max_position_embeddings: int = 4096,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._arguments = (rope_dim, rope_theta, rope_scaling, max_position_embeddings)
        inv_freq, attention_factor = inverse_frequencies(*self._arguments)
        # As text: with dynamic=True torch.compile makes an input of every float attribute, a CPU
        # tensor among the CUDA ones, and CUDA graphs refuse those.
        self._attention_factor = repr(attention_factor)
        device = torch.get_default_device() if device is None else device
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    @property
    def attention_factor(self) -> float:
        """Return the factor of cosine and sine, 1 unless YaRN's two mscales differ."""
        return float(self._attention_factor)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)``, each [..., rope / 2] in ``dtype``, of positions [...]."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow a device move with fresh float32 frequencies.

        ``.bfloat16()`` would round them to 8 bits, an angle error of 100 radians at position
        50000, and ``to_empty`` would leave them unset.
        """
        device = fn(self.inv_freq).device
        self.inv_freq = inverse_frequencies(*self._arguments)[0].to(device)
        return self
