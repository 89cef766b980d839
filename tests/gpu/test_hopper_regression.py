"""Symptom: an illegal memory access, or wrong rows, some steps after a larger or padded batch.

The schedule's buffers were allocated by the first call and sized by it. A later, larger batch,
or the padded dummy batch of a data-parallel rank, then read past them inside a replayed graph.
"""

import hopper
import pytest
import torch

import mla_ops
from mla_ops.diagnostics import measuring
from mla_ops.shapes import IDLE_REQUEST

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

CAPTURED, MAX_LEN = 16, 640
LIVE = (16, 9, 1, 12, 3, 16)


class LazyBuffers(mla_ops.MLAMetadataBuffers):
    """The fault: sized by the first call, allocated anew when that turns out too small."""

    def update(self, cache_seqlens, *, seqlen_q=1):
        if not hasattr(self, "first") or self.first < cache_seqlens.shape[0]:
            self.first = cache_seqlens.shape[0]
            self.num_splits = torch.zeros(self.first + 2, dtype=torch.int32, device="cuda")
            self.tile_scheduler_metadata = torch.full(
                (132, 8), IDLE_REQUEST, dtype=torch.int32, device="cuda"
            )
        return super().update(cache_seqlens, seqlen_q=seqlen_q)


class FixedBySmallestBatch(mla_ops.MLAMetadataBuffers):
    """The same fault without a new allocation: the capacity is what the first call needed."""

    def update(self, cache_seqlens, *, seqlen_q=1):
        if not hasattr(self, "first"):
            self.first = cache_seqlens.shape[0]
            self.num_splits = torch.zeros(self.first + 1, dtype=torch.int32, device="cuda")
        return super().update(cache_seqlens, seqlen_q=seqlen_q)


def guard_buffers(model, guarded):
    for module in (model.schedule, model.cache):
        for name, buffer in list(module.named_buffers()):
            module._register(name, guarded(buffer))


def lengths_of(batch, phase):
    return [(37 * phase + 61 * row) % (MAX_LEN - 8) + 1 for row in range(batch)]


def eager_call(model, lengths):
    """Decode a batch of another size than the captured one, with the same buffers."""
    batch = len(lengths)
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    metadata = model.schedule.update(cache_seqlens)
    q = torch.randn((batch, 1, model.heads, 576), dtype=torch.bfloat16, device="cuda")
    table = model.cache.block_table[:batch]
    pool = model.cache.kv_cache(0)
    out, lse = mla_ops.mla_decode(
        *(q, pool, table, cache_seqlens, metadata),
        softmax_scale=hopper.SCALE,
        backend=model.backend,
    )
    hopper.check(q, pool, table, cache_seqlens, out, lse)
    return metadata


def replay_live_rows(model, tokens, run):
    """Replay with fewer live rows than were captured; padded rows must come out empty."""
    for phase, live in enumerate(LIVE):
        hopper.renew(tokens, phase)
        model.set_lengths(lengths_of(CAPTURED, phase), live=live)
        model.cache.block_table[live:] = 0
        outs, lses = run()
        model.check_against_oracle(tokens[0], outs, lses)
        assert (outs[:, live:] == 0).all()
        assert (lses[:, live:] == -torch.inf).all()
        model.shuffle_pages(phase)


def scenario(buffers=mla_ops.MLAMetadataBuffers, *, by_hand, backend="flash_mla"):
    """Small batch, larger batches, dummy batch, then a graph of the captured size."""
    guarded = hopper.Guarded()
    model = hopper.Layers(2, CAPTURED, MAX_LEN, backend=backend)
    model.schedule = buffers(CAPTURED, num_heads_q=model.heads, device="cuda")
    guard_buffers(model, guarded)
    model.shuffle_pages(99)
    addresses = model.addresses()
    for batch in (2, 5, 16):
        rows, splits = eager_call(model, lengths_of(batch, 0))
        assert rows.data_ptr() == addresses["schedule.tile_scheduler_metadata"]
        assert splits.data_ptr() == addresses["schedule.num_splits"]
        assert splits.shape == (batch + 1,)
        guarded.check()
    # The dummy batch of a rank that has nothing to do: all rows padded, table of zeros.
    table = model.cache.block_table.clone()
    model.cache.block_table.zero_()
    eager_call(model, [0] * CAPTURED)
    model.cache.block_table.copy_(table)
    guarded.check()
    tokens = tuple(guarded(tensor) for tensor in model.tokens())
    model.set_lengths([0] * CAPTURED, live=0)
    if by_hand:
        graph, result = hopper.captured(model, tokens)

        def run():
            graph.replay()
            return result

        replay_live_rows(model, tokens, run)
    else:
        with hopper.cudagraph_or_error(), measuring() as recorder:
            step = hopper.compiled(model)

            def run():
                torch.compiler.cudagraph_mark_step_begin()
                return step(*tokens)

            replay_live_rows(model, tokens, run)
            seen = recorder.result()
        assert (seen.graphs, seen.recordings, seen.skips) == (1, 1, 0), seen.describe()
        assert seen.replays >= len(LIVE) - 2
    torch.cuda.synchronize()
    guarded.check()
    assert model.addresses() == addresses


@pytest.mark.parametrize("by_hand", [True, False], ids=["captured_by_hand", "reduce_overhead"])
@pytest.mark.parametrize("backend", ["flash_mla", "triton"])
def test_larger_batches_after_a_small_one(by_hand, backend):
    scenario(by_hand=by_hand, backend=backend)


@pytest.mark.parametrize("buffers", [LazyBuffers, FixedBySmallestBatch])
def test_the_scenario_fails_with_lazy_buffers(buffers):
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        scenario(buffers, by_hand=True)


def test_capacity_is_refused_by_name_not_read_out_of_bounds():
    buffers = mla_ops.MLAMetadataBuffers(4, num_heads_q=16, device="cuda")
    with pytest.raises(mla_ops.CacheCapacityError, match="max_batch_size = 4"):
        buffers.update(torch.zeros(5, dtype=torch.int32, device="cuda"))


def test_an_idle_part_of_a_small_batch_stays_idle_in_a_larger_one(flash_mla):
    """Symptom: begin_req == B of a batch of 2 is a real request of a batch of 16."""
    buffers = mla_ops.MLAMetadataBuffers(16, num_heads_q=16, device="cuda")
    rows, _ = buffers.update(torch.tensor([1, 1], dtype=torch.int32, device="cuda"))
    assert (rows[2:, 0] == IDLE_REQUEST).all()
