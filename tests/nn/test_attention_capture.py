"""MLAAttention under torch.compile and on fake CUDA tensors, and what it refuses."""

import pytest
import torch
from layers import (
    SIZES,
    B,
    advance,
    assert_same,
    decode,
    hidden,
    make_cache,
    make_layer,
    prefill,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_ops.cache import MLAMetadataBuffers, PagedKVCache
from mla_ops.errors import CacheCapacityError
from mla_ops.nn import MLAAttention, MLAConfig


class Model(nn.Module):
    """Two layers that share a schedule, as a compiled decode step holds them."""

    def __init__(self, rows, dtype):
        super().__init__()
        self.layers = nn.ModuleList([make_layer(dtype) for _ in range(2)])
        self.cache = make_cache(rows, dtype, layers=2)
        self.buffers_ = MLAMetadataBuffers(rows, num_heads_q=4)

    def forward(self, x):
        batch, seqlen_q, _ = x.shape
        positions, slot_mapping = advance(self.cache, batch, seqlen_q)
        metadata = self.buffers_.update(self.cache.cache_seqlens.narrow(0, 0, batch))
        for index, layer in enumerate(self.layers):
            x = x + layer(x, positions, self.cache, index, slot_mapping, metadata)
        return x


def snapshot(cache):
    return {name: buffer.clone() for name, buffer in cache.named_buffers()}


def restore(cache, state):
    for name, buffer in cache.named_buffers():
        buffer.copy_(state[name])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_decode_step_compiles_to_one_graph_for_every_batch(backend):
    torch._dynamo.reset()
    model, counter = Model(4, torch.float32), CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for rows in (2, 3, 4, 3):
        x = hidden(torch.float32, rows=rows, tokens=1)
        before = snapshot(model.cache)
        expected = model(x)
        after = snapshot(model.cache)
        restore(model.cache, before)
        assert_same(compiled(x), expected, atol=2e-5)
        assert torch.equal(model.cache.cache_seqlens, after["cache_seqlens"])
        torch.testing.assert_close(
            *(model.cache.kv_cache(1), after["kv_cache_1"]),
            rtol=0,
            atol=2e-5,
            equal_nan=True,
        )
    assert counter.frame_count == 1
    inputs = [
        n.meta["example_value"] for n in counter.graphs[0].graph.find_nodes(op="placeholder")
    ]
    # Symptom: eps and scales became CPU scalar inputs, which CUDA graphs refuse.
    assert all(value.dim() > 0 for value in inputs if isinstance(value, torch.Tensor))


def test_traces_on_fake_cuda_tensors(monkeypatch):
    """Symptom: indexing that the CPU wheel cannot trace for CUDA models."""
    # The random initialisation is what the CPU wheel cannot trace.
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)
    with FakeTensorMode(), torch.device("cuda"):
        layer = MLAAttention(MLAConfig(**SIZES), dtype=torch.bfloat16)
        cache = PagedKVCache(1, 2, 64, latent_dim=128, rope_dim=32)
        x = torch.empty(2, 4, 64, dtype=torch.bfloat16)
        for call, options in (
            (layer, {}),
            (layer.prefill, {}),
            (layer.prefill, {"cached_tokens": 5}),
        ):
            positions = cache.cache_seqlens.unsqueeze(1) + torch.arange(4)
            out = call(x, positions, cache, 0, torch.full((8,), -1), **options)
            assert out.shape == x.shape
            assert out.device.type == "cuda"


def test_prefill_and_its_chunks_compile_whole():
    torch._dynamo.reset()
    layer, x = make_layer(torch.float32), hidden(torch.float32)
    expected = prefill(layer, make_cache(dtype=torch.float32), x)
    cache = make_cache(dtype=torch.float32)
    compiled = torch.compile(layer.prefill, backend="aot_eager", fullgraph=True)
    parts, start = [], 0
    for chunk in x.split((9, 7, 7), dim=1):
        positions, slot_mapping = advance(cache, B, chunk.shape[1])
        parts.append(compiled(chunk, positions, cache, 0, slot_mapping, cached_tokens=start))
        start += chunk.shape[1]
    assert_same(torch.cat(parts, dim=1), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": torch.zeros(2, 1, 8, dtype=torch.int32)}, ValueError, "indices must be None"),
        ({"hidden_states": torch.zeros(2, 64)}, ValueError, "hidden_states must be"),
        ({"hidden_states": torch.zeros(2, 1, 63)}, ValueError, "hidden_states must be"),
        ({"positions": torch.zeros(1, 1)}, ValueError, "positions must be"),
        (
            {"hidden_states": torch.zeros(3, 1, 64), "positions": torch.zeros(3, 1)},
            *(CacheCapacityError, "at most max_batch_size = 2 rows, got 3"),
        ),
        ({"slot_mapping": torch.zeros(1, dtype=torch.int64)}, ValueError, "one row per slot"),
        ({"cache": torch.float64}, TypeError, "kv_c must be torch.float64 like kv_cache"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_arguments_that_do_not_fit_are_refused(compiled, change, error, message):
    torch._dynamo.reset()
    layer = make_layer(torch.float32)
    change = dict(change)
    cache = make_cache(dtype=change.pop("cache", torch.float32))
    arguments = {
        "hidden_states": torch.zeros(2, 1, 64),
        "positions": torch.zeros(2, 1, dtype=torch.int64),
        "slot_mapping": torch.full((2,), -1),
    } | change
    call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    with pytest.raises(Exception if compiled else error, match=message):
        call(cache=cache, layer=0, **arguments)


def test_more_cached_tokens_than_the_table_holds_are_refused():
    layer, x = make_layer(), hidden()
    with pytest.raises(CacheCapacityError, match="cached_tokens must be at most 64, got 65"):
        prefill(layer, make_cache(), x, start=65)


def test_a_call_that_would_need_a_gradient_is_refused():
    layer, cache, x = make_layer(), make_cache(), hidden(tokens=1)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="inference only"):
        decode(layer, cache, x)
