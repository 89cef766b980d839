"""Four layers compiled whole: launches, clones, graphs, pools and outputs."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import mla_ops
from mla_ops.testing import assert_no_pool_clones, graph_text

LAYERS, ROWS, HEADS = 4, 64, 2


class Stack(nn.Module):
    """A decode step over a cache held by the module, with other data in every layer."""

    def __init__(self, backend="auto", device="cpu"):
        super().__init__()
        self.backend = backend
        self.cache = mla_ops.PagedKVCache(
            *(LAYERS, ROWS, 32),
            latent_dim=128,
            rope_dim=32,
            page_size=16,
            dtype=torch.float32,
            device=device,
        )
        self.schedule = mla_ops.MLAMetadataBuffers(ROWS, num_heads_q=HEADS, device=device)

    def forward(self, q, kv_c, k_pe):
        batch = q.shape[0]
        slots = self.cache.advance_(batch)
        lengths = self.cache.cache_seqlens.narrow(0, 0, batch)
        table = self.cache.block_table.narrow(0, 0, batch)
        metadata = self.schedule.update(lengths)
        results = []
        for layer in range(LAYERS):
            self.cache.append_(layer, kv_c + layer, k_pe - layer, slots)
            results += mla_ops.mla_decode(
                *(q, self.cache.kv_cache(layer), table, lengths, metadata),
                softmax_scale=0.1,
                head_dim_v=128,
                backend=self.backend,
            )
        return results


def filled(rows=ROWS):
    stack = Stack()
    for row in range(rows):
        if row % 5 != 4:
            stack.cache.allocate(row, 32)
    return stack


def inputs(batch, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, 1, HEADS, 160), (batch, 128), (batch, 32))
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch.inference_mode(False), torch.no_grad():
        yield
    torch._dynamo.reset()


def test_batches_share_graphs_and_equal_eager_bit_for_bit():
    eager, compiled_stack = filled(), filled()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(compiled_stack, backend=counter, fullgraph=True)
    for seed, batch in enumerate((1, 2, 3, 8, 5, 64)):
        expected = eager(*inputs(batch, seed))
        for got, want in zip(compiled(*inputs(batch, seed)), expected, strict=True):
            assert torch.equal(got, want)
        for name, buffer in eager.named_buffers():
            assert torch.equal(compiled_stack.get_buffer(name), buffer), name
    # One for size 1, which torch specialises, the first static one, and the dynamic one.
    assert counter.frame_count <= 3


def test_generated_code_launches_each_operator_once_a_layer_and_clones_nothing():
    stack = filled()
    _, codes = run_and_get_code(torch.compile(stack, fullgraph=True), *inputs(8))
    assert len(codes) == 1
    launches = {
        name: codes[0].count(f"mla_ops.{name}.default(")
        for name in ("mla_metadata_out", "mla_metadata", "append_kv_", "mla_decode", "snapshot")
    }
    assert launches == {
        "mla_metadata_out": 1,
        "mla_metadata": 0,
        "append_kv_": LAYERS,
        "mla_decode": LAYERS,
        "snapshot": 0,
    }
    pool = stack.cache.kv_cache(0)
    assert_no_pool_clones(stack, *inputs(8), pool_bytes=pool.nbytes)


def test_fake_cuda_graph_names_its_backend():
    text = graph_text(Stack(backend="triton"), *inputs(8), device="cuda")
    assert text.count("mla_decode") == LAYERS
    assert "triton" in text
    assert text.count("append_kv_") == LAYERS
    assert text.count("mla_metadata_out") == 1
