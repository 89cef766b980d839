"""PagedKVCache against a plain Python model; MLAMetadataBuffers within and beyond capacity."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import mla_ops
from mla_ops import CacheCapacityError, MLAMetadataBuffers, PagedKVCache

ROWS, MOST, PAGE, PAGES = 3, 20, 4, 9


def make():
    return PagedKVCache(
        *(2, ROWS, MOST),
        latent_dim=128,
        rope_dim=32,
        page_size=PAGE,
        num_pages=PAGES,
        dtype=torch.float32,
    )


def addresses(module):
    return {name: buffer.data_ptr() for name, buffer in module.named_buffers()}


ACTIONS = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, ROWS - 1), st.integers(0, MOST + 2)),
    st.tuples(st.just("free"), st.integers(0, ROWS - 1), st.just(0)),
    st.tuples(st.just("advance"), st.integers(0, ROWS), st.integers(1, 3)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
)


class Model:
    """What the cache must do, in plain Python."""

    def __init__(self):
        self.lengths, self.owned = [0] * ROWS, [0] * ROWS

    def capacity(self, row):
        return min(self.owned[row] * PAGE, MOST)

    def allocate(self, row, tokens):
        wanted = max(-(-tokens // PAGE) - self.owned[row], 0)
        if tokens > MOST or sum(self.owned) + wanted > PAGES:
            return False
        self.owned[row] += wanted
        return True

    def advance(self, rows, tokens):
        fits = []
        for row in range(rows):
            fits += [self.lengths[row] + i < self.capacity(row) for i in range(tokens)]
            self.lengths[row] = min(self.lengths[row] + tokens, self.capacity(row))
        return fits


def apply(cache, model, action, row, count):
    if action == "allocate":
        before = [buffer.clone() for buffer in cache.buffers()]
        if model.allocate(row, count):
            cache.allocate(row, count)
        else:
            with pytest.raises(CacheCapacityError, match=r"raise (max_seq_len|num_pages)"):
                cache.allocate(row, count)
            for buffer, old in zip(cache.buffers(), before, strict=True):
                assert torch.equal(buffer, old)
    elif action == "free":
        cache.free(row)
        model.lengths[row] = model.owned[row] = 0
    elif action == "advance":
        lengths = list(model.lengths)
        fits = model.advance(row, count)
        slots = cache.advance_(row, count).tolist()
        table = cache.block_table.tolist()
        for index, (slot, fit) in enumerate(zip(slots, fits, strict=True)):
            position = lengths[index // count] + index % count
            page = table[index // count][position // PAGE] if fit else None
            assert slot == (page * PAGE + position % PAGE if fit else -1)
    else:
        cache.reset()
        model.__init__()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ACTIONS, max_size=25))
def test_random_programs_equal_the_model(program):
    cache, model = make(), Model()
    fixed = addresses(cache)
    for action, row, count in program:
        apply(cache, model, action, row, count)
        assert cache.cache_seqlens.tolist() == model.lengths
        assert cache.capacity.tolist() == [model.capacity(row) for row in range(ROWS)]
        owned = [
            page
            for row in range(ROWS)
            for page in cache.block_table[row, : model.owned[row]].tolist()
        ]
        assert len(set(owned)) == len(owned)
    assert addresses(cache) == fixed


@pytest.mark.parametrize("method", ["allocate", "free", "reset"])
def test_handing_out_pages_inside_a_compiled_region_is_refused(method):
    cache = make()
    arguments = {"allocate": (0, 4), "free": (0,), "reset": ()}[method]

    def step(x):
        getattr(cache, method)(*arguments)
        return x + 1

    with pytest.raises(Exception, match=f"PagedKVCache: {method} must be called between steps"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1))


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double", "float"])
def test_dtypes_stay(convert):
    for module in (make(), MLAMetadataBuffers(4, num_heads_q=16)):
        fixed = addresses(module)
        dtypes = {name: buffer.dtype for name, buffer in module.named_buffers()}
        getattr(module, convert)()
        assert {name: buffer.dtype for name, buffer in module.named_buffers()} == dtypes
        assert addresses(module) == fixed


def test_a_move_is_allowed_before_first_use_and_refused_after():
    assert make().to("meta").kv_cache(0).device.type == "meta"
    cache = make()
    cache.allocate(0, 1)
    cache.free(0)
    with pytest.raises(RuntimeError, match="device must be chosen before first use"):
        cache.to("meta")
    buffers = MLAMetadataBuffers(4, num_heads_q=16)
    buffers.update(torch.ones(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="device must be chosen before first use"):
        buffers.to("meta")


def test_buffers_are_not_saved_and_copies_are_apart():
    cache = make()
    assert not cache.state_dict()
    twin = copy.deepcopy(cache)
    twin.allocate(0, 4)
    assert cache.capacity.tolist() == [0] * ROWS


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.allocate(ROWS, 1), IndexError, "row must be in"),
        (lambda c: c.allocate(0, -1), ValueError, "num_tokens must be >= 0"),
        (lambda c: c.advance_(ROWS + 1), CacheCapacityError, "raise max_batch_size"),
        (
            lambda c: c.append_(0, torch.zeros(1, 96), torch.zeros(1, 64), torch.zeros(1).long()),
            ValueError,
            "latent_dim",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, error, text):
    with pytest.raises(error, match=text):
        call(make())


def test_metadata_is_written_in_place_into_leading_slices():
    buffers = MLAMetadataBuffers(8, num_heads_q=16, max_seqlen_q=4)
    fixed = addresses(buffers)
    for batch, seqlen_q, parts in ((8, 1, 132), (3, 4, 132), (0, 1, 132), (1, 2, 132)):
        lengths = torch.arange(batch, dtype=torch.int32) * 100
        metadata = buffers.update(lengths, seqlen_q=seqlen_q)
        assert metadata.tile_scheduler_metadata.shape == (parts, 8)
        assert metadata.num_splits.shape == (batch + 1,)
        assert metadata.num_splits.data_ptr() == fixed["num_splits"]
        expected = mla_ops.mla_metadata(lengths, num_heads_q=16, seqlen_q=seqlen_q)
        assert torch.equal(metadata.tile_scheduler_metadata, expected.tile_scheduler_metadata)
        assert torch.equal(metadata.num_splits, expected.num_splits)
    assert addresses(buffers) == fixed


def test_a_later_larger_batch_is_refused_by_name_not_written_out_of_bounds():
    """Symptom: buffers sized by the first, small call; a larger batch wrote beyond their end."""
    buffers = MLAMetadataBuffers(4, num_heads_q=16)
    before = [buffer.clone() for buffer in buffers.buffers()]
    with pytest.raises(CacheCapacityError, match="raise max_batch_size"):
        buffers.update(torch.ones(5, dtype=torch.int32))
    with pytest.raises(CacheCapacityError, match="raise max_seqlen_q"):
        buffers.update(torch.ones(4, dtype=torch.int32), seqlen_q=2)
    for buffer, old in zip(buffers.buffers(), before, strict=True):
        assert torch.equal(buffer, old)
    buffers.update(torch.ones(4, dtype=torch.int32))
