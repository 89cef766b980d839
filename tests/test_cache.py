"""PagedKVCache and MLAMetadataBuffers: capacity, refusals, conversions; addresses are for life."""

import copy

import pytest
import torch

from mla_ops import CacheCapacityError, KVFormat, MLAMetadataBuffers, PagedKVCache, mla_metadata


def addresses(module):
    return {name: buffer.data_ptr() for name, buffer in module.named_buffers()}


def make_cache(**options):
    options = {"latent_dim": 128, "rope_dim": 32, "page_size": 4, **options}
    return PagedKVCache(2, 3, 10, **options)


def make_metadata(**options):
    return MLAMetadataBuffers(4, num_heads_q=16, max_seqlen_q=2, **options)


def test_shapes_and_defaults():
    cache = PagedKVCache(2, 3, 130)
    assert cache.kv_cache(1).shape == (9, 64, 1, 576)
    assert cache.kv_cache(1).dtype == torch.bfloat16
    assert cache.block_table.shape == (3, 3)
    assert dict(cache.state_dict()) == {}
    storages = {buffer.untyped_storage().data_ptr() for buffer in cache.buffers()}
    assert len(storages) == 5, "one storage each"
    buffers = MLAMetadataBuffers(4, num_heads_q=16)
    assert buffers.tile_scheduler_metadata.shape == (132, 8)
    assert buffers.num_splits.shape == (6,)
    assert dict(buffers.state_dict()) == {}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.allocate(3, 1), IndexError, r"row must be in \[0, 3\), got 3 \(raise max_b"),
        (lambda c: c.allocate(-1, 1), IndexError, r"row must be in \[0, 3\), got -1"),
        (lambda c: c.free(3), IndexError, r"row must be in \[0, 3\), got 3"),
        (lambda c: c.allocate(0, -1), ValueError, r"num_tokens must be >= 0, got -1"),
        (
            lambda c: c.allocate(0, 11),
            CacheCapacityError,
            r"max_seq_len = 10, got 11 \(raise max_",
        ),
        (lambda c: c.advance_(4), CacheCapacityError, r"max_batch_size = 3, got 4 \(raise max_b"),
        (
            lambda c: c.append_(0, torch.ones(1, 32), torch.ones(1, 128), torch.tensor([0])),
            ValueError,
            r"kv_c must be \[n, latent_dim\] = \[n, 128\], got shape \(1, 32\)",
        ),
        (lambda c: c.kv_cache(2), AttributeError, "kv_cache_2"),
    ],
)
def test_refusals_of_the_cache(call, error, message):
    cache = make_cache()
    cache.allocate(0, 5)
    before = [buffer.clone() for buffer in cache.buffers()]
    with pytest.raises(error, match=message):
        call(cache)
    for buffer, then in zip(cache.buffers(), before, strict=True):
        assert torch.equal(buffer, then)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (make_cache, lambda c, x: c.advance_(x.shape[0]), "PagedKVCache: batch_size must be at"),
        (
            make_cache,
            lambda c, x: c.append_(0, x.view(1, -1), x.view(1, -1), torch.tensor([0])),
            "PagedKVCache: kv_c must be",
        ),
        (make_metadata, lambda m, x: m.update(x.int()), "MLAMetadataBuffers: cache_seqlens must"),
        (
            make_metadata,
            lambda m, x: m.update(x.int()[:4], seqlen_q=x.shape[0]),
            "MLAMetadataBuffers: seqlen_q must be at most",
        ),
    ],
    ids=["advance_", "append_", "update-batch", "update-seqlen_q"],
)
def test_refusals_when_compiled(make, call, message, dynamic):
    torch._dynamo.reset()
    module = make()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic or None, backend="eager")
    with pytest.raises(Exception, match=message):
        compiled(module, torch.ones(7))


@pytest.mark.parametrize("method", ["allocate", "free", "reset"])
def test_host_methods_are_refused_inside_a_compiled_region(method):
    torch._dynamo.reset()
    cache = make_cache()
    arguments = {"allocate": (0, 5), "free": (0,), "reset": ()}[method]

    def step(x):
        getattr(cache, method)(*arguments)
        return x + 1

    message = (
        f"PagedKVCache: {method} must be called between steps, got a call inside a torch.comp"
    )
    with pytest.raises(Exception, match=message):
        torch.compile(step, fullgraph=True, backend="eager")(torch.ones(1))
    getattr(cache, method)(*arguments)


@pytest.mark.parametrize("make", [make_cache, make_metadata])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_buffer_is_marked_static(make, device):
    """CUDA graphs refuse to mutate an input that is not: without it a replay is skipped."""
    for name, buffer in make().to(device).named_buffers():
        assert getattr(buffer, "_dynamo_static_input_type", None) is not None, name


def test_a_copy_has_pages_of_its_own():
    cache = make_cache()
    twin = copy.deepcopy(cache)
    twin.allocate(0, 4)
    assert cache.capacity.tolist() == [0, 0, 0]
    assert not set(addresses(cache).values()) & set(addresses(twin).values())


def test_fp8_is_refused():
    with pytest.raises(ValueError, match=r"kv_format must be KVFormat.DENSE, got KVFormat.FP8"):
        make_cache(kv_format=KVFormat.FP8)


@pytest.mark.parametrize("make", [make_cache, make_metadata])
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.float64),
        lambda m: m.to(torch.ones(1, dtype=torch.float64)),
        lambda m: m.cpu(),
        lambda m: torch.nn.Sequential(m, torch.nn.Linear(1, 1)).to(torch.float16)[0],
    ],
    ids=["bfloat16", "half", "double", "to", "to-device", "to-tensor", "cpu", "parent"],
)
def test_a_conversion_changes_nothing(make, convert):
    module = make()
    before = {name: (b.dtype, b.data_ptr(), id(b)) for name, b in module.named_buffers()}
    convert(module)
    assert before == {name: (b.dtype, b.data_ptr(), id(b)) for name, b in module.named_buffers()}


def use_cache(cache):
    cache.allocate(0, 3)
    cache.free(0)


def use_metadata(buffers):
    buffers.update(torch.tensor([5], dtype=torch.int32))


@pytest.mark.parametrize(("make", "use"), [(make_cache, use_cache), (make_metadata, use_metadata)])
def test_a_device_move_is_refused_after_first_use(make, use):
    moved = make().to("meta")
    assert {buffer.device.type for buffer in moved.buffers()} == {"meta"}
    dtypes = [buffer.dtype for buffer in make().buffers()]
    moved = make().to("meta", torch.float16)
    assert {buffer.device.type for buffer in moved.buffers()} == {"meta"}
    assert [buffer.dtype for buffer in moved.buffers()] == dtypes
    module = make()
    use(module)
    before = addresses(module)
    with pytest.raises(RuntimeError, match="device must be chosen before first use"):
        module.to("meta")
    assert addresses(module) == before


def test_freed_pages_come_back_and_lengths_survive_neighbours():
    cache = make_cache(num_pages=4)
    cache.allocate(0, 8)
    cache.allocate(1, 5)
    with pytest.raises(CacheCapacityError, match=r"row 2 must find 1 free pages, got 0 of 4"):
        cache.allocate(2, 1)
    cache.advance_(3, 5)
    cache.free(0)
    cache.allocate(2, 8)
    assert cache.cache_seqlens.tolist() == [0, 5, 0]
    assert set(cache.block_table[2, :2].tolist()).isdisjoint(cache.block_table[1, :2].tolist())


@pytest.mark.parametrize(
    ("lengths", "seqlen_q", "message"),
    [
        ([1] * 5, 1, r"at most max_batch_size = 4 sequences, got 5 \(raise max_batch_size\)"),
        ([1], 3, r"seqlen_q must be at most max_seqlen_q = 2, got 3 \(raise max_seqlen_q\)"),
    ],
)
def test_metadata_beyond_the_capacity_is_refused(lengths, seqlen_q, message):
    """Symptom elsewhere: a larger batch than the first reads past buffers sized by the first."""
    buffers = make_metadata()
    use_metadata(buffers)
    before = [buffer.clone() for buffer in buffers.buffers()]
    with pytest.raises(CacheCapacityError, match=message):
        buffers.update(torch.tensor(lengths, dtype=torch.int32), seqlen_q=seqlen_q)
    for buffer, then in zip(buffers.buffers(), before, strict=True):
        assert torch.equal(buffer, then)


def test_metadata_without_parts_is_refused():
    with pytest.raises(ValueError, match="num_heads_k and num_sm_parts must be >= 1"):
        make_metadata(num_sm_parts=0)


@pytest.mark.parametrize("num_sm_parts", [None, 3])
def test_metadata_is_rewritten_in_place_over_300_steps(num_sm_parts):
    buffers = make_metadata(num_sm_parts=num_sm_parts)
    before, generator = addresses(buffers), torch.Generator().manual_seed(0)
    for step in range(300):
        batch, seqlen_q = step % 5, 1 + step % 2
        lengths = torch.randint(0, 20_000, (batch,), generator=generator, dtype=torch.int32)
        rest = buffers.num_splits[batch + 1 :].clone()
        got = buffers.update(lengths, seqlen_q=seqlen_q)
        wanted = mla_metadata(
            lengths, num_heads_q=16, seqlen_q=seqlen_q, num_sm_parts=num_sm_parts
        )
        for ours, theirs, name in zip(got, wanted, before, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.is_contiguous()
            assert ours.data_ptr() == before[name]
        assert torch.equal(buffers.num_splits[batch + 1 :], rest)
    assert addresses(buffers) == before
