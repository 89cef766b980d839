"""Faults planted on purpose, to see that the checks of decode_loop.py tell."""

from __future__ import annotations

from typing import Any

import torch
from _loop_model import LoopModel, TappedAttention
from torch import Tensor

import mla_ops


class StaleSchedule(mla_ops.MLAMetadataBuffers):
    """Computed once, for the lengths of the first step; no step updates it."""

    def plan_once(self) -> None:
        lengths = torch.ones(self.max_batch_size, dtype=torch.int32)
        super().update(lengths.to(self.num_splits.device))

    def update(self, cache_seqlens: Tensor, *, seqlen_q: int = 1) -> mla_ops.MLAMetadata:
        splits = self.num_splits.narrow(0, 0, cache_seqlens.shape[0] + 1)
        return mla_ops.MLAMetadata(self.tile_scheduler_metadata, splits)


class LosingCache(mla_ops.PagedKVCache):
    """Drops the tokens of the last layer."""

    def append_(self, layer: int, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        if layer < self.num_layers - 1:
            super().append_(layer, kv_c, k_pe, slot_mapping)


class SharingCache(mla_ops.PagedKVCache):
    """Takes pages back from a finished request twice, and so gives them to two."""

    def free(self, row: int) -> None:
        pages = list(self._row_pages[row])
        super().free(row)
        self._free_pages.extend(pages)


class SlotZeroCache(mla_ops.PagedKVCache):
    """Gives padded rows slot 0 in place of none, as an engine without a sentinel does."""

    def advance_(self, batch_size: int, num_tokens: int = 1) -> Tensor:
        return super().advance_(batch_size, num_tokens).clamp(min=0)


class WrongScale(TappedAttention):
    """Guesses the softmax scale from the width of a key."""

    @property
    def softmax_scale(self) -> float:
        return float(self.config.kv_lora_rank + self.config.qk_rope_head_dim) ** -0.5


class LeakyCache(mla_ops.PagedKVCache):
    """Lets a finished request live on: its row keeps its length and pages."""

    def free(self, row: int) -> None:
        self._free_pages.extend(reversed(self._row_pages[row]))
        self._row_pages[row] = []


_PLANTS: dict[str, tuple[str, Any]] = {
    "stale-metadata": ("schedule", StaleSchedule),
    "lost-append": ("cache", LosingCache),
    "shared-pages": ("cache", SharingCache),
    "kept-rows": ("cache", LeakyCache),
    "wrong-scale": ("layers.0.attention", WrongScale),
    "written-padding": ("cache", SlotZeroCache),
}
PLANTS = tuple(_PLANTS)


def planted(model: LoopModel, plant: str | None) -> LoopModel:
    """Break ``model`` in the way that ``plant`` names; None leaves it whole."""
    if plant is not None:
        name, broken = _PLANTS[plant]
        module = model.get_submodule(name)
        module.__class__ = broken
        if isinstance(module, StaleSchedule):
            module.plan_once()
    return model
