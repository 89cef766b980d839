"""Absorbed decode for Hugging Face transformers, in one line: ``patch(model)``.

transformers caches the latents of Multi-head Latent Attention but expands all of them through
``kv_b_proj`` at every layer and step. A patched model decodes from the latents:

    patch(model)
    model.generate(**inputs, cache_implementation="static")

What is promised: in float32 and float64 the same greedy tokens as without the patch, and logits
within 1e-5 of tiny models' in float32; in 16 bits tokens may differ, and the error against
float32 is on average no larger than the unpatched model's: latents stay float32 (on CUDA two
16-bit numbers each) until W_UV has been applied, which FlashMLA cannot write, so that it is not
used there. Only static caches decode absorbed. Prefill, dynamic caches and calls without a cache
run the model's own expansion with SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Refuses old releases before anything else of transformers is imported.
import mla_ops.integrations.transformers_version  # noqa: F401  # isort: skip
from mla_ops.integrations.transformers_cache import MLAStaticCache
from mla_ops.integrations.transformers_hooks import NAME, keep_latents, register
from mla_ops.integrations.transformers_layers import (
    MLALayer,
    SkippedLayer,
    find_layers,
    forget_weight,
    refresh_weight,
)
from mla_ops.integrations.transformers_verify import Verification, compare
from mla_ops.ops._selection import backend_report

__all__ = ["MLAStaticCache", "PatchReport", "patch", "patched", "unpatch", "verify"]

register()
# Instance attributes of a patched model; all of them can be copied and pickled.
_STATE = "_mla_ops_patch"
_PREPARE = "_prepare_static_cache"
# Where generate keeps its compiled forward.
_COMPILED = "_compiled_call"


@dataclass(frozen=True)
class PatchReport:
    """What ``patch`` did: every MLA layer, served or skipped with the reason."""

    layers: tuple[MLALayer, ...]
    skipped: tuple[SkippedLayer, ...]
    backend: str
    bytes_per_token: int

    def __str__(self) -> str:
        lines = [
            f"{len(self.layers)} layers decode absorbed by {self.backend!r}, "
            f"{self.bytes_per_token} bytes of cache a token; {len(self.skipped)} skipped"
        ]
        lines += [
            f"  {x.name}: H={x.num_heads_q} latent={x.kv_lora_rank} rope={x.qk_rope_head_dim} "
            f"nope={x.qk_nope_head_dim} v={x.v_head_dim} softmax_scale={x.softmax_scale:.6f}"
            for x in self.layers
        ]
        lines += [f"  {x.name}: skipped: {x.reason}" for x in self.skipped]
        return "\n".join(lines)


class _PrepareStaticCache:
    """Stands in for ``model._prepare_static_cache``: one memory for all ``generate`` calls.

    Fixed addresses let captured graphs live on from one call to the next.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.cache: MLAStaticCache | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out of copies and pickles."""
        return {"model": self.model, "cache": None}

    def __call__(
        self,
        cache_implementation: str,
        batch_size: int,
        max_cache_len: int,
        prefill_chunk_size: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MLAStaticCache:
        """Return an empty cache for ``generate``, on the memory of the last one if it fits."""
        if kwargs or "offloaded" in cache_implementation:
            raise ValueError(
                'mla_ops: cache_implementation must be "static", got '
                f"{cache_implementation!r} {sorted(kwargs)} (unpatch the model for other caches)"
            )
        padding = (model_kwargs or {}).get("attention_mask")
        if prefill_chunk_size is not None and padding is not None and not bool(padding.all()):
            raise ValueError(
                f"mla_ops: prefill_chunk_size must be None for a padded batch, got "
                f"{prefill_chunk_size} (prefill in one piece, or without padding)"
            )
        if self.cache is not None and self.cache.fits(batch_size, max_cache_len):
            self.cache = self.cache.take_over()
            return self.cache
        if self.cache is not None:
            batch_size, max_cache_len = self.cache.grown(batch_size, max_cache_len)
            self.cache.retire()
            self.cache = None
        self.cache = MLAStaticCache(
            self.model, max_batch_size=batch_size, max_cache_len=max_cache_len
        )
        return self.cache


@dataclass
class _PatchState:
    """What ``unpatch`` needs: the attention implementation every config had."""

    configs: list[tuple[Any, str | None]]


def patch(model: nn.Module) -> PatchReport:
    """Let every MLA layer of ``model`` decode absorbed from a static cache of paged latents.

    A model is served whole or not at all; one that is not stays as it is, and the report says
    why. Patching twice renews the patch.

    Args:
        model: a transformers model in evaluation mode.

    Returns:
        PatchReport: the layers served, or those skipped with their reasons.

    Raises:
        ValueError: the model has no MLA layer, or is in training mode.
    """
    if model.training:
        raise ValueError(
            "patch: model must be in evaluation mode, got training mode (call model.eval())"
        )
    served, skipped = find_layers(model)
    if served:
        unpatch(model)
        _install(model, served)
    return _report(model, served, skipped)


def _install(model: nn.Module, served: list[MLALayer]) -> None:
    configs: dict[int, Any] = {}
    for layer in served:
        module: Any = layer.module
        configs[id(module.config)] = module.config
        module.expand_kv = keep_latents
        refresh_weight(module)
    # Code compiled before would run without the hooks.
    model.__dict__.pop(_COMPILED, None)
    state = _PatchState([(config, config._attn_implementation) for config in configs.values()])
    for config, _ in state.configs:
        config._attn_implementation = NAME
    setattr(model, _STATE, state)
    if hasattr(model, _PREPARE):
        setattr(model, _PREPARE, _PrepareStaticCache(model))


def unpatch(model: nn.Module) -> None:
    """Take the patch out; the model computes bit for bit what it did before. Idempotent."""
    state: _PatchState | None = model.__dict__.get(_STATE)
    if state is None:
        return
    for config, implementation in state.configs:
        config._attn_implementation = implementation
    for module in model.modules():
        if module.__dict__.get("expand_kv") is keep_latents:
            del module.__dict__["expand_kv"]
            forget_weight(module)
    prepare = model.__dict__.pop(_PREPARE, None)
    if prepare is not None and prepare.cache is not None:
        prepare.cache.retire()
    model.__dict__.pop(_COMPILED, None)
    del model.__dict__[_STATE]


@contextmanager
def patched(model: nn.Module) -> Iterator[PatchReport]:
    """Patch ``model`` for the length of a ``with`` block."""
    report = patch(model)
    try:
        yield report
    finally:
        unpatch(model)


def verify(
    model: nn.Module,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 16,
) -> Verification:
    """Generate greedily with and without the patch and compare; leaves the model as it was.

    Args:
        model: a model that ``patch`` serves, patched or not.
        input_ids: [B, T] prompts, padded on the left.
        attention_mask: [B, T] zeros, then ones; None means no padding.
        max_new_tokens: tokens to generate.

    Returns:
        Verification: whether all tokens are equal, and the largest difference of logits up to the
            first token that differs.

    Raises:
        ValueError: the model is not served.
    """
    was_patched = _STATE in model.__dict__
    unpatch(model)
    try:
        return compare(model, patched, input_ids, attention_mask, max_new_tokens)
    finally:
        if was_patched:
            patch(model)


def _report(model: nn.Module, served: list[MLALayer], skipped: list[SkippedLayer]) -> PatchReport:
    if not served:
        return PatchReport((), tuple(skipped), "none", 0)
    dtype: Any = model.dtype
    first = served[0]
    report = backend_report(
        device=first.device,
        dtype=dtype,
        num_heads_q=first.num_heads_q,
        head_dim=first.kv_lora_rank + first.qk_rope_head_dim,
        head_dim_v=first.kv_lora_rank,
        out_dtype=torch.float32 if dtype.itemsize == 2 else None,
    )
    size = torch.empty((), dtype=dtype).element_size()
    width = sum(layer.kv_lora_rank + layer.qk_rope_head_dim for layer in served)
    return PatchReport(tuple(served), (), report.choice, width * size)
