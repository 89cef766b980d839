"""PagedKVCache and MLAMetadataBuffers: fixed-address tensors of capacity that live as buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops._torch import inside_graph, streaming_multiprocessors
from mla_ops.buffers import FixedBuffers
from mla_ops.errors import CacheCapacityError
from mla_ops.formats import KVFormat
from mla_ops.ops.append import append_kv_
from mla_ops.ops.metadata import MLAMetadata, default_num_sm_parts, mla_metadata
from mla_ops.shapes import IDLE_REQUEST, METADATA_FIELDS, ceil_div

__all__ = ["MLAMetadataBuffers", "PagedKVCache"]


class MLAMetadataBuffers(FixedBuffers):
    """The schedule's tensors, allocated once for the largest batch and rewritten in place.

    Args:
        max_batch_size: the largest batch of any call: sequences served, the largest captured
            batch, or the padded dummy batch of data parallelism, whichever is greatest.
        num_heads_q: H on this rank.
        max_seqlen_q: the largest S.
        num_heads_k: KV heads; MLA has 1.
        topk: keys per query of sparse decodes; None for dense ones.
        backend: the backend that will read the metadata.
        schedule: see ``mla_metadata``.
        num_sm_parts: rows of the schedule; None means what the device has.
        device: where the decode runs.
    """

    def __init__(
        self,
        max_batch_size: int,
        *,
        num_heads_q: int,
        max_seqlen_q: int = 1,
        num_heads_k: int = 1,
        topk: int | None = None,
        backend: str = "auto",
        schedule: str = "auto",
        num_sm_parts: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_heads_k < 1 or (num_sm_parts is not None and num_sm_parts < 1):
            raise ValueError(
                "MLAMetadataBuffers: num_heads_k and num_sm_parts must be >= 1, got "
                f"{num_heads_k} and {num_sm_parts} (leave them at their defaults)"
            )
        self.max_batch_size = max_batch_size
        self.max_seqlen_q = max_seqlen_q
        self.num_heads_q = num_heads_q
        self.num_heads_k = num_heads_k
        self.topk = topk
        self.backend = backend
        self.schedule = schedule
        self.num_sm_parts = num_sm_parts
        device = torch.get_default_device() if device is None else torch.device(device)
        rows = num_sm_parts or streaming_multiprocessors(device)
        idle = torch.zeros((rows, METADATA_FIELDS), dtype=torch.int32)
        idle[:, 0] = IDLE_REQUEST
        self._register("tile_scheduler_metadata", idle.to(device))
        # One entry more than the largest prefix sum: [: B + 1] is never the whole buffer, which
        # torch.compile would trace as a graph of its own.
        splits = torch.zeros((max_batch_size + 2,), dtype=torch.int32)
        self._register("num_splits", splits.to(device))

    tile_scheduler_metadata: Tensor
    num_splits: Tensor

    def _used(self) -> bool:
        return bool((self.num_splits != 0).any())

    def update(self, cache_seqlens: Tensor, *, seqlen_q: int = 1) -> MLAMetadata:
        """Rewrite the schedule for the present lengths; one operator call inside the graph.

        Args:
            cache_seqlens: [B] int32, B at most ``max_batch_size``.
            seqlen_q: S of the decode calls that follow, at most ``max_seqlen_q``.

        Returns:
            MLAMetadata: leading slices [T, 8] and [B + 1] of the buffers.

        Raises:
            CacheCapacityError: B or S is beyond the capacity; nothing was written.
        """
        batch = cache_seqlens.shape[0]
        if batch > self.max_batch_size:
            raise CacheCapacityError(
                f"MLAMetadataBuffers: cache_seqlens must be of at most max_batch_size = "
                f"{self.max_batch_size} sequences, got {batch} (raise max_batch_size)"
            )
        if seqlen_q > self.max_seqlen_q:
            raise CacheCapacityError(
                f"MLAMetadataBuffers: seqlen_q must be at most max_seqlen_q = "
                f"{self.max_seqlen_q}, got {seqlen_q} (raise max_seqlen_q)"
            )
        parts = self.num_sm_parts or default_num_sm_parts(
            *(self.num_splits.device, self.num_heads_q, seqlen_q, self.num_heads_k, self.topk)
        )
        return mla_metadata(
            cache_seqlens,
            num_heads_q=self.num_heads_q,
            seqlen_q=seqlen_q,
            num_heads_k=self.num_heads_k,
            topk=self.topk,
            backend=self.backend,
            schedule=self.schedule,
            out=MLAMetadata(
                self.tile_scheduler_metadata.narrow(0, 0, parts),
                self.num_splits.narrow(0, 0, batch + 1),
            ),
        )


class PagedKVCache(FixedBuffers):
    """The paged latent cache: pools, block table and lengths at addresses fixed for life.

    Pages are handed out on the host between steps (``allocate``, ``free``, ``reset``); the graph
    only advances lengths and appends (``advance_``, ``append_``). A row is live while it owns
    pages.

    Args:
        num_layers: pools, one storage each.
        max_batch_size: rows.
        max_seq_len: tokens a row can grow to.
        latent_dim: kv_lora_rank.
        rope_dim: qk_rope_head_dim.
        page_size: P, tokens a page.
        num_pages: N, pages of every pool; None means enough for all rows at full length.
        kv_format: DENSE (the FP8 formats are not served yet).
        dtype: dtype of the pools.
        device: where they lie.
    """

    block_table: Tensor
    cache_seqlens: Tensor
    capacity: Tensor

    def __init__(
        self,
        num_layers: int,
        max_batch_size: int,
        max_seq_len: int,
        *,
        latent_dim: int = 512,
        rope_dim: int = 64,
        page_size: int = 64,
        num_pages: int | None = None,
        kv_format: KVFormat = KVFormat.DENSE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kv_format is not KVFormat.DENSE:
            raise ValueError(
                f"PagedKVCache: kv_format must be KVFormat.DENSE, got {kv_format} "
                "(FP8 caches are not served yet)"
            )
        self.num_layers = num_layers
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.page_size = page_size
        self.latent_dim = latent_dim
        max_pages = ceil_div(max_seq_len, page_size)
        self.num_pages = max_batch_size * max_pages if num_pages is None else num_pages
        pool = (self.num_pages, page_size, 1, latent_dim + rope_dim)
        for layer in range(num_layers):
            self._register(f"kv_cache_{layer}", torch.zeros(pool, dtype=dtype, device=device))
        for name, shape in (
            ("block_table", (max_batch_size, max_pages)),
            ("cache_seqlens", (max_batch_size,)),
            ("capacity", (max_batch_size,)),
        ):
            self._register(name, torch.zeros(shape, dtype=torch.int32, device=device))
        # Host-side bookkeeping of allocate, free and reset; never read inside a graph.
        self._free_pages = list(range(self.num_pages - 1, -1, -1))
        self._row_pages: list[list[int]] = [[] for _ in range(max_batch_size)]
        self._allocated = False

    def _used(self) -> bool:
        return self._allocated

    def kv_cache(self, layer: int) -> Tensor:
        """Return the pool of ``layer``, [N, P, 1, D]."""
        return self.get_buffer(f"kv_cache_{layer}")

    def allocate(self, row: int, num_tokens: int) -> None:
        """Give ``row`` enough pages for ``num_tokens`` tokens in all; it is live from now on.

        Raises:
            IndexError, ValueError: no such row, or a negative number of tokens.
            CacheCapacityError: beyond max_seq_len or out of pages; nothing was changed.
            RuntimeError: called inside a compiled region or a CUDA graph capture.
        """
        self._refuse_inside_graph("allocate")
        self._check_row(row)
        if num_tokens < 0:
            raise ValueError(
                f"PagedKVCache: num_tokens must be >= 0, got {num_tokens} (use free to shrink)"
            )
        if num_tokens > self.max_seq_len:
            raise CacheCapacityError(
                f"PagedKVCache: num_tokens must be at most max_seq_len = {self.max_seq_len}, got "
                f"{num_tokens} (raise max_seq_len)"
            )
        owned = self._row_pages[row]
        wanted = ceil_div(num_tokens, self.page_size) - len(owned)
        if wanted <= 0:
            return
        if wanted > len(self._free_pages):
            raise CacheCapacityError(
                f"PagedKVCache: row {row} must find {wanted} free pages, got "
                f"{len(self._free_pages)} of {self.num_pages} (raise num_pages or free a row)"
            )
        self._allocated = True
        pages = [self._free_pages.pop() for _ in range(wanted)]
        table = torch.tensor(pages, dtype=torch.int32)
        self.block_table[row, len(owned) : len(owned) + wanted].copy_(table)
        owned.extend(pages)
        self.capacity[row] = min(len(owned) * self.page_size, self.max_seq_len)

    def free(self, row: int) -> None:
        """Take back the pages of ``row``; its length and capacity become 0."""
        self._refuse_inside_graph("free")
        self._check_row(row)
        # Lengths first: no order of uploads may show a step a length without its pages.
        self.cache_seqlens[row] = 0
        self.capacity[row] = 0
        self.block_table[row] = 0
        self._free_pages.extend(reversed(self._row_pages[row]))
        self._row_pages[row] = []

    def reset(self) -> None:
        """Free every row; addresses stay."""
        self._refuse_inside_graph("reset")
        self.cache_seqlens.zero_()
        self.capacity.zero_()
        self.block_table.zero_()
        self._free_pages = list(range(self.num_pages - 1, -1, -1))
        self._row_pages = [[] for _ in range(self.max_batch_size)]

    def advance_(self, batch_size: int, num_tokens: int = 1) -> Tensor:
        """Grow the live rows of the leading ``batch_size`` rows by ``num_tokens``, in the graph.

        Returns:
            slot_mapping [batch_size * num_tokens] int64, row-major: where to append the new
            tokens. Rows that are not live keep length 0 and get -1, as do tokens beyond the
            capacity of their row, whose length stops there: allocate before the step, the graph
            cannot raise.

        Raises:
            CacheCapacityError: more rows than ``max_batch_size``.
        """
        if batch_size > self.max_batch_size:
            raise CacheCapacityError(
                f"PagedKVCache: batch_size must be at most max_batch_size = "
                f"{self.max_batch_size}, got {batch_size} (raise max_batch_size)"
            )
        lengths = self.cache_seqlens.narrow(0, 0, batch_size)
        capacity = self.capacity.narrow(0, 0, batch_size)
        steps = torch.arange(num_tokens, dtype=torch.int32, device=lengths.device)
        position = lengths.unsqueeze(1) + steps  # [B, n]
        fits = position < capacity.unsqueeze(1)
        column = torch.where(fits, position // self.page_size, 0).long()
        page = self.block_table.narrow(0, 0, batch_size).gather(1, column).long()
        slot = torch.where(fits, page * self.page_size + position % self.page_size, -1)
        lengths.copy_(torch.minimum(lengths + num_tokens, capacity))
        return slot.view(-1)

    def append_(self, layer: int, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Write kv_c [n, latent] and k_pe [n, rope] into the slots of ``layer``, in the graph."""
        if kv_c.shape[-1] != self.latent_dim:
            raise ValueError(
                f"PagedKVCache: kv_c must be [n, latent_dim] = [n, {self.latent_dim}], got shape "
                f"{tuple(kv_c.shape)} (pass the latent and the rope apart)"
            )
        append_kv_(self.kv_cache(layer), kv_c, k_pe, slot_mapping)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_batch_size:
            raise IndexError(
                f"PagedKVCache: row must be in [0, {self.max_batch_size}), got {row} "
                "(raise max_batch_size)"
            )

    def _refuse_inside_graph(self, method: str) -> None:
        graph = inside_graph()
        if graph is not None:
            raise RuntimeError(
                f"PagedKVCache: {method} must be called between steps, got a call inside {graph} "
                "(pages are handed out on the host: move the call out of the step)"
            )
