"""Which attention modules of a transformers model can be served, their dimensions and weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mla_ops.shapes import LATENT_ROPE_PAIRS, MAX_HEADS

__all__ = [
    "MLALayer",
    "SkippedLayer",
    "dense_weight",
    "find_layers",
    "forget_weight",
    "kv_b_weight",
    "refresh_weight",
    "served_layers",
]

# Holds W of a kv_b_proj that is not a plain linear; not persistent, so state_dict stays clean.
_WEIGHT = "_mla_ops_kv_b_weight"
_DIMENSIONS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class MLALayer:
    """One attention module that is served."""

    name: str
    module: nn.Module
    layer_idx: int
    num_heads_q: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    device: torch.device


@dataclass(frozen=True)
class SkippedLayer:
    """One MLA module that is not served, and why."""

    name: str
    reason: str


def find_layers(model: nn.Module) -> tuple[list[MLALayer], list[SkippedLayer]]:
    """Sort the MLA modules of ``model`` into served and skipped ones.

    A model is served whole or not at all: half a model would run two caches side by side. If one
    layer cannot be served, all of them are skipped.

    Returns:
        ``(served, skipped)``: one of them is empty.

    Raises:
        ValueError: the model has no MLA layer.
    """
    candidates = [
        (name, module) for name, module in model.named_modules() if _is_mla_attention(module)
    ]
    if not candidates:
        raise ValueError(
            "patch: model must have Multi-head Latent Attention layers of transformers, got "
            f"{type(model).__name__} without any (nothing to gain: leave it as it is)"
        )
    skipped = [
        SkippedLayer(name, reason)
        for name, module in candidates
        if (reason := _reason_against(module)) is not None
    ]
    if skipped:
        refused = {layer.name for layer in skipped}
        skipped += [
            SkippedLayer(name, f"served only together with {skipped[0].name}")
            for name, _ in candidates
            if name not in refused
        ]
        return [], skipped
    return [_describe(name, module) for name, module in candidates], []


def served_layers(model: nn.Module) -> list[MLALayer]:
    """Return the layers of a model that is served.

    Raises:
        ValueError: it is not; names the first reason.
    """
    served, skipped = find_layers(model)
    if skipped:
        raise ValueError(
            f"MLAStaticCache: model must be one that patch serves, got {type(model).__name__}: "
            f"{skipped[0].name}: {skipped[0].reason} (use transformers' own cache)"
        )
    return served


def _is_mla_attention(module: nn.Module) -> bool:
    return hasattr(module, "kv_b_proj") and hasattr(module, "kv_lora_rank")


def _reason_against(module: Any) -> str | None:
    forward = _source(module)
    order = [forward.find(part) for part in (".update(", ".expand_kv(", "attention_interface(")]
    if not hasattr(type(module), "expand_kv") or -1 in order:
        return "its forward does not go through cache.update, expand_kv and attention_interface"
    missing = [
        name for name in (*_DIMENSIONS, "scaling", "layer_idx") if not hasattr(module, name)
    ]
    if missing:
        return f"it has no {', '.join(missing)}"
    if order[0] > order[1]:
        return "it caches expanded keys and values in this release of transformers"
    if "from_topk" in forward:
        return "its sparse selection rebuilds the attention mask from the cached keys"
    if getattr(module, "sliding_window", None) is not None:
        return f"sliding window of {module.sliding_window} tokens"
    pair = (module.kv_lora_rank, module.qk_rope_head_dim)
    if pair not in LATENT_ROPE_PAIRS:
        return f"(kv_lora_rank, qk_rope_head_dim) = {pair} is none of {LATENT_ROPE_PAIRS}"
    if getattr(module.kv_b_proj, "bias", None) is not None:
        return "kv_b_proj has a bias, which absorption does not carry"
    heads = _num_heads(module)
    if not 1 <= heads <= MAX_HEADS:
        return f"{heads} heads; 1 to {MAX_HEADS} are served"
    return None


def _source(module: nn.Module) -> str:
    try:
        return inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return ""


def _num_heads(module: Any) -> int:
    # Tensor parallelism shards the weight and leaves num_heads: the weight knows this rank's.
    if type(module.kv_b_proj) is nn.Linear:
        rows = int(module.kv_b_proj.weight.shape[0])
    else:
        rows = int(dense_weight(module).shape[0])
    return rows // (int(module.qk_nope_head_dim) + int(module.v_head_dim))


def _describe(name: str, module: Any) -> MLALayer:
    return MLALayer(
        name=name,
        module=module,
        layer_idx=int(module.layer_idx),
        num_heads_q=_num_heads(module),
        **{dimension: int(getattr(module, dimension)) for dimension in _DIMENSIONS},
        softmax_scale=float(module.scaling),
        device=_parameter(module).device,
    )


def _parameter(module: nn.Module) -> Tensor:
    # The latent's norm is never quantised nor wrapped by an adapter.
    norm: Any = module.kv_a_layernorm
    weight: Tensor = norm.weight
    return weight


def dense_weight(module: Any) -> Tensor:
    """Read the weight [H * (nope + v), latent] of any kv_b_proj by projecting the unit vectors."""
    norm = _parameter(module)
    with torch.no_grad():
        unit = torch.eye(int(module.kv_lora_rank), dtype=norm.dtype, device=norm.device)
        projected: Tensor = module.kv_b_proj(unit)
        return projected.T.contiguous()


def refresh_weight(module: nn.Module) -> None:
    """Keep a dense copy of a quantised or adapted kv_b_proj, rewritten in place when it exists."""
    if type(module.kv_b_proj) is nn.Linear:
        module._buffers.pop(_WEIGHT, None)
        return
    weight = dense_weight(module)
    kept = module._buffers.get(_WEIGHT)
    if kept is None or kept.shape != weight.shape or kept.dtype != weight.dtype:
        module.register_buffer(_WEIGHT, weight, persistent=False)
    else:
        kept.copy_(weight)


def forget_weight(module: nn.Module) -> None:
    """Remove what ``refresh_weight`` keeps."""
    module._buffers.pop(_WEIGHT, None)
    module._non_persistent_buffers_set.discard(_WEIGHT)


def kv_b_weight(module: nn.Module) -> Tensor:
    """Return the weight [H * (nope + v), latent] of kv_b_proj.

    Raises:
        RuntimeError: kv_b_proj was replaced after patching.
    """
    kept = module._buffers.get(_WEIGHT)
    if kept is not None:
        return kept
    projection: Any = module.kv_b_proj
    if type(projection) is not nn.Linear:
        raise RuntimeError(
            "mla_ops: kv_b_proj must be what it was when the cache was built, got "
            f"{type(projection).__name__} instead of Linear (reset the cache, or patch again)"
        )
    weight: Tensor = projection.weight
    return weight
