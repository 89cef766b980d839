"""MLAStaticCache: a transformers static cache whose MLA layers own fused paged latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import cache_utils

from mla_ops._torch import inside_graph
from mla_ops.integrations.transformers_layers import MLALayer, refresh_weight, served_layers
from mla_ops.integrations.transformers_pool import (
    MLAIndexedStaticLayer,
    MLAStaticLayer,
    SharedState,
)

__all__ = ["MLAStaticCache"]

_StaticCache: Any = cache_utils.StaticCache
_StaticLayer: Any = cache_utils.StaticLayer


class _RetiredLayer(_StaticLayer):  # type: ignore[misc]
    """Stands in the layers of a cache whose memory a later ``generate`` took over."""

    def __init__(self) -> None:
        super().__init__(0)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "MLAStaticCache: cache must be the one of the latest generate call, got one whose "
            "memory a later call reused (build an MLAStaticCache of your own and pass it)"
        )

    update = get_seq_length = get_mask_sizes = reset = reorder_cache = crop = _refuse


class MLAStaticCache(_StaticCache):  # type: ignore[misc]
    """The static cache of a patched model; build one yourself, or let ``generate`` do it.

    Args:
        model: a model that ``patch`` accepts.
        max_batch_size: rows; smaller batches use the first ones.
        max_cache_len: tokens a row can hold, padding included.
        page_size: tokens a page.

    Raises:
        ValueError: no layer of the model is served.
    """

    layers: list[Any]

    def __init__(
        self, model: nn.Module, *, max_batch_size: int, max_cache_len: int, page_size: int = 64
    ) -> None:
        graph = inside_graph()
        if graph is not None:
            raise RuntimeError(
                f"MLAStaticCache: cache must be built between steps, got a call inside {graph} "
                "(build it before the compiled region)"
            )
        served = served_layers(model)
        config: Any = model.config
        super().__init__(config.get_text_config(decoder=True), max_cache_len)
        # Private: some releases have read-only properties of these names.
        self._max_batch_size = max_batch_size
        self._max_cache_len = max_cache_len
        self._modules_by_layer = {layer.layer_idx: layer for layer in served}
        dtype: Any = model.dtype
        groups: dict[torch.device, list[MLALayer]] = {}
        for layer in served:
            groups.setdefault(layer.device, []).append(layer)
        for group in groups.values():
            shared = SharedState(group, max_batch_size, max_cache_len, page_size, dtype)
            for index, layer in enumerate(group):
                self.layers[layer.layer_idx] = _layer_class(self.layers[layer.layer_idx])(
                    max_cache_len, shared, index, leads=index == 0
                )
        self._refresh_weights()

    def reset(self) -> None:
        """Forget all tokens and take over changed adapter weights; addresses stay."""
        super().reset()
        self._refresh_weights()

    def fits(self, batch: int, length: int) -> bool:
        """Tell whether the memory serves ``batch`` rows of ``length`` tokens."""
        rows = self._max_batch_size
        return length <= self._max_cache_len and (
            batch == rows if self._batch_is_fixed() else batch <= rows
        )

    def grown(self, batch: int, length: int) -> tuple[int, int]:
        """Return the capacity of a cache that serves what this one does, and that too."""
        rows = batch if self._batch_is_fixed() else max(batch, self._max_batch_size)
        return rows, max(length, self._max_cache_len)

    def _batch_is_fixed(self) -> bool:
        # The states of linear attention layers have the batch size they first saw.
        return not all(isinstance(layer, MLAStaticLayer) for layer in self.layers)

    def take_over(self) -> MLAStaticCache:
        """Return an empty cache on the same memory; this one refuses every use from now on."""
        heir: MLAStaticCache = object.__new__(MLAStaticCache)
        heir.__dict__.update(self.__dict__)
        self.retire()
        heir.reset()
        return heir

    def retire(self) -> None:
        """Let go of the memory and refuse every use from now on."""
        self.layers = [_RetiredLayer()] * len(self.layers)

    def _refresh_weights(self) -> None:
        for layer in self._modules_by_layer.values():
            refresh_weight(layer.module)


def _layer_class(layer: Any) -> type[MLAStaticLayer]:
    classes: Mapping[type, type[MLAStaticLayer]] = {
        _StaticLayer: MLAStaticLayer,
        cache_utils.StaticIndexedLayer: MLAIndexedStaticLayer,
    }
    if type(layer) not in classes:
        raise ValueError(
            "MLAStaticCache: layers of the cache must be StaticLayer or StaticIndexedLayer, got "
            f"{type(layer).__name__} (this model is not served: unpatch it)"
        )
    return classes[type(layer)]
