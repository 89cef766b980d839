"""The checks of decode_loop.py between sampled steps: what a stale or wrong step cannot pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from _loop_model import LoopModel, Tap
from _loop_requests import Active
from torch import Tensor

import mla_ops
from mla_ops.backends import reference
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64


class _Seen(NamedTuple):
    """The keys of a row at its last check."""

    request: int
    keys: Tensor  # [length, D]


class Checker:
    """Compares a step with what the host knows and with float64 attention over the caches."""

    def __init__(self, model: LoopModel) -> None:
        self._model = model
        self._seen: dict[tuple[int, int], _Seen] = {}

    def check(self, batch_size: int, taps: tuple[Tap, ...], active: Mapping[int, Active]) -> str:
        """Return what is wrong with the step just made, the first thing found, or nothing."""
        try:
            self._check_lengths(active)
            self._check_pages(active)
            self._check_schedule(batch_size)
            for layer, tap in zip(self._model.tapped, taps, strict=True):
                self._check_cache(layer, tap, active)
                self._check_attention(layer, tap, batch_size)
        except (AssertionError, ValueError) as error:
            return str(error)
        return ""

    def _check_lengths(self, active: Mapping[int, Active]) -> None:
        lengths = self._model.cache.cache_seqlens.tolist()
        for row, length in enumerate(lengths):
            expected = active[row].length if row in active else 0
            assert length == expected, f"length of row {row} is {length} instead of {expected}"

    def _check_pages(self, active: Mapping[int, Active]) -> None:
        table = self._model.cache.block_table.cpu()
        owners: dict[int, int] = {}
        for row, each in active.items():
            for page in table[row, : -(-each.request.total // self._page_size)].tolist():
                other = owners.setdefault(page, row)
                assert other == row, f"page {page} belongs to rows {other} and {row}"

    def _check_schedule(self, batch_size: int) -> None:
        """Recompute the schedule from the present lengths."""
        schedule, lengths = self._model.schedule, self._model.cache.cache_seqlens[:batch_size]
        mla_ops.check_metadata(
            (schedule.tile_scheduler_metadata, schedule.num_splits[: batch_size + 1]),
            lengths,
            num_heads_q=schedule.num_heads_q,
        )

    def _check_cache(self, layer: int, tap: Tap, active: Mapping[int, Active]) -> None:
        """The newest key is the step's own, and no older one has changed."""
        self._seen = {
            at: seen
            for at, seen in self._seen.items()
            if at[1] in active and active[at[1]].request.number == seen.request
        }
        for row, keys in self._keys(layer, active):
            newest = torch.cat((tap.kv_c[row], tap.k_pe[row]))
            assert torch.equal(keys[-1], newest), (
                f"layer {layer} row {row}: the key at {len(keys) - 1} is not the one appended"
            )
            before = self._seen.get((layer, row))
            assert before is None or torch.equal(keys[: len(before.keys)], before.keys), (
                f"layer {layer} row {row}: an older key has changed"
            )
            self._seen[layer, row] = _Seen(active[row].request.number, keys)

    def _keys(self, layer: int, active: Mapping[int, Active]) -> Iterator[tuple[int, Tensor]]:
        pool, table = self._model.cache.kv_cache(layer), self._model.cache.block_table
        for row, each in active.items():
            pages = table[row, : -(-each.length // self._page_size)].long()
            yield row, pool[pages].flatten(0, 2)[: each.length]

    def _check_attention(self, layer: int, tap: Tap, batch_size: int) -> None:
        out, lse = self._oracle(layer, tap.q)
        try:
            assert_close_to_fp64(tap.out, out)
            assert_lse_close_to_fp64(tap.lse, lse)
        except AssertionError as error:
            raise AssertionError(f"layer {layer} of batch {batch_size}: {error}") from error
        empty = self._model.cache.cache_seqlens[:batch_size] == 0
        assert bool((tap.out[empty] == 0).all()), f"layer {layer}: a padded row's out is not 0"
        assert bool((tap.lse[empty] == -torch.inf).all()), (
            f"layer {layer}: a padded row's lse is not -inf"
        )

    def _oracle(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attend in float64, a row at a time: the batch at once would not fit."""
        cache, config = self._model.cache, self._model.config
        batch, seqlen_q, heads, _ = q.shape
        options = {"dtype": torch.float64, "device": q.device}
        out = torch.zeros((batch, seqlen_q, heads, config.kv_lora_rank), **options)
        lse = torch.full((batch, heads, seqlen_q), -torch.inf, **options)
        pool, lengths = cache.kv_cache(layer), cache.cache_seqlens[:batch]
        for row, length in enumerate(lengths.tolist()):
            if length == 0:
                continue
            keys = pool[cache.block_table[row, : -(-length // self._page_size)].long()].double()
            pages = torch.arange(keys.shape[0], dtype=torch.int32, device=q.device)
            one = slice(row, row + 1)
            reference.mla_decode_out(
                *(q[one].double(), keys, pages[None], lengths[one], None, None),
                *(out[one], lse[one]),
                softmax_scale=config.softmax_scale,
                causal=True,
                attn_sink=None,
            )
        return out, lse

    @property
    def _page_size(self) -> int:
        return self._model.cache.page_size
