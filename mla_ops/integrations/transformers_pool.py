"""The layers of an MLAStaticCache: pools of latents whose memory never moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from mla_ops._torch import mark_static_address
from mla_ops.cache import PagedKVCache
from mla_ops.errors import CacheCapacityError
from mla_ops.integrations.transformers_layers import MLALayer

__all__ = ["PAGED", "PAGED_INDEXED", "MLAIndexedStaticLayer", "MLAStaticLayer", "SharedState"]

# transformers asks a cache for the sizes of its mask and hands them to the mask function without
# looking at them: these offsets tell ours that the keys are paged latents, and of which kind.
PAGED = -(1 << 30)
PAGED_INDEXED = PAGED + 1


# Untyped on purpose: annotations of these classes differ from release to release.
_StaticLayer: Any = cache_utils.StaticLayer
_StaticIndexedLayer: Any = cache_utils.StaticIndexedLayer


class SharedState:
    """What the MLA layers of one device share: pools, table and the position."""

    def __init__(
        self, layers: list[MLALayer], batch: int, length: int, page_size: int, dtype: torch.dtype
    ) -> None:
        first = layers[0]
        self.paged = PagedKVCache(
            *(len(layers), batch, length),
            latent_dim=first.kv_lora_rank,
            rope_dim=first.qk_rope_head_dim,
            page_size=page_size,
            dtype=dtype,
            device=first.device,
        )
        # Row b owns the pages [b * M, (b + 1) * M) for life: its slots are b * M * P + position.
        for row in range(batch):
            self.paged.allocate(row, length)
        self.position = torch.zeros((), dtype=torch.int64, device=first.device)
        mark_static_address(self.position)


class MLAStaticLayer(_StaticLayer):  # type: ignore[misc]
    """One attention layer's pool; its memory is allocated at construction and never moves.

    ``update`` writes nothing: how many tokens of each row are real is known to the attention
    mask, which reaches the attention function and not the cache. It hands both over.
    """

    def __init__(
        self, max_cache_len: int, shared: SharedState, index: int, *, leads: bool
    ) -> None:
        super().__init__(max_cache_len)
        self.leads = leads
        self.kv_cache = shared.paged.kv_cache(index)
        self.block_table = shared.paged.block_table
        self.cumulative_length = shared.position
        self.latent_dim = shared.paged.latent_dim
        self.max_batch_size, max_pages = self.block_table.shape
        self.row_tokens = max_pages * self.kv_cache.shape[1]
        # transformers reads these: keys and values for its own bookkeeping, never for attention.
        self.keys, self.values = self.kv_cache, self.block_table
        self.dtype, self.device = self.kv_cache.dtype, self.kv_cache.device
        self.batch_size = self.max_batch_size
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the memory exists since construction."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return this layer and the new latents for the attention function to append.

        Args:
            key_states: [B, 1, S, latent] normalised latents of the new tokens.
            value_states: [B, 1, S, rope] their rotated rope keys.
            args: unused.
            kwargs: unused.

        Returns:
            ``(layer, (key_states, value_states))``.

        Raises:
            CacheCapacityError: B is beyond the capacity.
        """
        if key_states.shape[0] > self.max_batch_size:
            raise CacheCapacityError(
                f"MLAStaticCache: batch must be at most max_batch_size = {self.max_batch_size}, "
                f"got {key_states.shape[0]} (build the cache with a larger max_batch_size)"
            )
        if self.leads:
            self.cumulative_length.add_(key_states.shape[2])
        return self, (key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and, as offset, the mark of paged latents."""
        return self.max_cache_len, PAGED

    def get_seq_length(self) -> Any:
        """Return the tokens seen, padding included, as a tensor (reading it would synchronise)."""
        return self.cumulative_length

    def rows(self, batch: int) -> Tensor:
        """View the pool as the first ``batch`` rows, [B, M * P, D]."""
        return self.kv_cache.view(self.max_batch_size, self.row_tokens, -1).narrow(0, 0, batch)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search, in place: addresses stay."""
        rows = self.rows(beam_idx.shape[0])
        rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, in place."""
        if tokens_to_remove > 0:
            raise ValueError(
                "MLAStaticCache: tokens_to_remove must be <= 0, got "
                f"{tokens_to_remove} (a negative number removes that many tokens)"
            )
        if self.leads:
            self.cumulative_length.sub_(abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything, in place."""
        self.kv_cache.zero_()
        self.cumulative_length.zero_()

    def offload(self) -> None:
        """Refuse: the pool's address is part of captured graphs."""
        raise ValueError(
            'MLAStaticCache: cache_implementation must be "static", got an offloaded cache '
            "(the pool never moves: unpatch the model to offload)"
        )

    prefetch = offload


class MLAIndexedStaticLayer(MLAStaticLayer, _StaticIndexedLayer):  # type: ignore[misc]
    """A layer of a sparse-attention model: positions are not compacted, and it keeps indexer keys.

    The indexer's keys are allocated at the first prefill, for the whole capacity.
    """

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and, as offset, the mark of indexed paged latents."""
        return self.max_cache_len, PAGED_INDEXED

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the new indexer keys [B, S, width]; return all, [B, max_cache_len, width]."""
        batch, seqlen, width = indexer_key_states.shape
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(
                indexer_key_states.new_empty((self.max_batch_size, 0, width))
            )
        keys: Tensor = self.indexer_keys.narrow(0, 0, batch)
        positions = torch.arange(seqlen, device=keys.device) + self.indexer_cumulative_length
        self.indexer_cumulative_length.add_(seqlen)
        keys.index_copy_(1, positions, indexer_key_states)
        return keys

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder pool and indexer keys in place."""
        super().reorder_cache(beam_idx)
        if self.is_indexer_initialized:
            keys = self.indexer_keys.narrow(0, 0, beam_idx.shape[0])
            keys.copy_(keys.index_select(0, beam_idx.to(keys.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of pool and indexer."""
        super().crop(tokens_to_remove)
        if self.is_indexer_initialized:
            self.indexer_cumulative_length.sub_(abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything, in place."""
        super().reset()
        if self.is_indexer_initialized:
            self.indexer_keys.zero_()
            self.indexer_cumulative_length.zero_()
