"""Four layers of our operators in one graph, the cache held by the module."""

from textwrap import wrap

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from mla_ops import MLAMetadataBuffers, PagedKVCache, mla_decode
from mla_ops.diagnostics.measure import measuring
from mla_ops.testing import graph_text

LAYERS, MAX_BATCH, LATENT, ROPE = 4, 64, 128, 32
SMALL = {"layers": LAYERS, "heads": 3, "dims": (LATENT, ROPE), "dtype": torch.float32}
LARGE = {"layers": 2, "heads": 16, "dims": (512, 64), "dtype": torch.bfloat16}


class Stack(nn.Module):
    """Attention without the projections: each layer appends, then decodes what it has."""

    def __init__(self, layers, heads, dims, dtype, *, page_size=4, backend="auto"):
        super().__init__()
        self.layers, self.latent_dim, self.backend = layers, dims[0], backend
        self.cache = PagedKVCache(
            *(layers, MAX_BATCH, 40),
            latent_dim=dims[0],
            rope_dim=dims[1],
            page_size=page_size,
            dtype=dtype,
        )
        self.metadata = MLAMetadataBuffers(MAX_BATCH, num_heads_q=heads, backend=backend)

    def forward(self, q, kv_c, k_pe):
        """Take q [B, 1, H, D], kv_c [B, latent], k_pe [B, rope] of each layer; return out, lse."""
        cache, batch = self.cache, q[0].shape[0]
        slots = cache.advance_(batch)
        lengths = cache.cache_seqlens.narrow(0, 0, batch)
        block_table = cache.block_table.narrow(0, 0, batch)
        metadata = self.metadata.update(lengths)
        results = []
        for layer in range(self.layers):
            cache.append_(layer, kv_c[layer], k_pe[layer], slots)
            results += mla_decode(
                *(q[layer], cache.kv_cache(layer), block_table, lengths, metadata),
                softmax_scale=0.1,
                head_dim_v=self.latent_dim,
                backend=self.backend,
            )
        return results


def make_stack(live=range(0, MAX_BATCH, 2)):
    """Every other row is live; the pools start as NaN."""
    stack = Stack(**SMALL)
    for layer in range(LAYERS):
        stack.cache.kv_cache(layer).fill_(float("nan"))
    for row in live:
        stack.cache.allocate(row, 40)
    return stack


def make_inputs(batch, seed, *, layers, heads, dims, dtype):
    """Other data in every layer and step."""
    generator = torch.Generator().manual_seed(1000 * batch + seed)

    def normal(*shape):
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(layers)]

    return normal(batch, 1, heads, sum(dims)), normal(batch, dims[0]), normal(batch, dims[1])


def check_step(compiled, stack, eager, batch, seed):
    """Compare outputs and whole buffers bit for bit, NaN included."""
    inputs = make_inputs(batch, seed, **SMALL)
    for got, want in zip(compiled(*inputs), eager(*inputs), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
    for (name, got), (_, want) in zip(stack.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


def run(batches, **options):
    stack, eager = make_stack(), make_stack()
    addresses = [buffer.data_ptr() for buffer in stack.buffers()]
    with torch.no_grad(), measuring(big_bytes=stack.cache.kv_cache(0).nbytes) as recorder:
        compiled = torch.compile(stack, fullgraph=True, **options)
        for seed, batch in enumerate(batches):
            check_step(compiled, stack, eager, batch, seed)
    assert [buffer.data_ptr() for buffer in stack.buffers()] == addresses
    first_tokens = {float(stack.cache.kv_cache(layer)[0, 0].sum()) for layer in range(LAYERS)}
    assert len(first_tokens) == LAYERS, "every layer has data of its own"
    return recorder.result()


@pytest.mark.parametrize(
    ("batches", "most_graphs"),
    [
        ([2, 3, 8, 5, 64, 2, 64], 2),
        ([1, 2, 3, 8, 5, 64, 1], 2),
        # torch makes a graph of its own for size 1, and one for size 0.
        ([3, 2, 1, 8, 5, 64, 0, 3], 4),
    ],
    ids=["without-1", "first-1", "later-1-and-0"],
)
def test_four_layers_are_one_graph_without_copies_equal_to_eager(batches, most_graphs):
    measured = run(batches)
    assert measured.graphs <= most_graphs
    assert measured.breaks == ()
    assert measured.clones == ()
    assert measured.launches == {
        "mla_ops.append_kv_": LAYERS,
        "mla_ops.mla_decode": LAYERS,
        "mla_ops.mla_metadata_out": 1,
    }
    # The same by hand, of every graph that was made.
    for code in measured.codes:
        assert code.count("torch.ops.mla_ops.mla_metadata_out.default(") == 1
        assert code.count("torch.ops.mla_ops.append_kv_.default(") == LAYERS
        assert code.count("torch.ops.mla_ops.mla_decode.default(") == LAYERS
        assert "aten.clone" not in code
        assert "mla_ops.snapshot" not in code


def test_compiled_for_dynamic_sizes_at_once_it_is_one_graph():
    assert run([7, 64, 5, 2], dynamic=True).graphs == 1


def test_rows_that_come_and_go_between_steps():
    """The graph of the first step serves what the host does later."""
    stack, eager = make_stack(live=[0, 1]), make_stack(live=[0, 1])
    with torch.no_grad(), measuring() as recorder:
        compiled = torch.compile(stack, fullgraph=True)
        for step in range(12):
            for cache in (stack.cache, eager.cache):
                if step == 4:
                    cache.free(0)
                elif step == 6:
                    cache.allocate(0, 2)
                    cache.allocate(3, 40)
                elif step == 9:
                    cache.reset()
                    cache.allocate(2, 3)
            check_step(compiled, stack, eager, 4, step)
    assert recorder.result().graphs == 1
    assert stack.cache.cache_seqlens[:4].tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize("backend", ["flash_mla", "triton", "auto"])
def test_golden_graph_for_cuda(backend):
    """Traced for a CUDA device that is not there; the graph names the backend it will use."""
    stack = Stack(**LARGE, page_size=64, backend=backend)
    text = graph_text(stack, *make_inputs(3, 0, **LARGE), device="cuda")
    assert text.count(f"backend={backend!r}") == 3
    lines = [
        line
        for long in text.replace(f"backend={backend!r}", "backend=BACKEND").splitlines()
        for line in wrap(long, 92, subsequent_indent="    ")
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
mla_ops.mla_metadata_out(cache_seqlens=updated cache.cache_seqlens,
    tile_scheduler_metadata=metadata.tile_scheduler_metadata,
    num_splits=metadata.num_splits, num_heads_q=16, seqlen_q=1, num_heads_k=1, topk=None,
    topk_length=None, kv_format=None, backend=BACKEND, schedule='auto')
mla_ops.append_kv_(kv_cache=cache.kv_cache_0, kv_c=kv_c[0], k_pe=k_pe[0],
    slot_mapping=<computed>)
%3 = mla_ops.mla_decode(q=q[0], kv_cache=cache.kv_cache_0, block_table=cache.block_table,
    cache_seqlens=updated cache.cache_seqlens,
    tile_scheduler_metadata=metadata.tile_scheduler_metadata,
    num_splits=metadata.num_splits, softmax_scale=0.1, head_dim_v=512, causal=True,
    attn_sink=None, descale_q=None, descale_k=None, backend=BACKEND)
mla_ops.append_kv_(kv_cache=cache.kv_cache_1, kv_c=kv_c[1], k_pe=k_pe[1],
    slot_mapping=<computed>)
%5 = mla_ops.mla_decode(q=q[1], kv_cache=cache.kv_cache_1, block_table=cache.block_table,
    cache_seqlens=updated cache.cache_seqlens,
    tile_scheduler_metadata=metadata.tile_scheduler_metadata,
    num_splits=metadata.num_splits, softmax_scale=0.1, head_dim_v=512, causal=True,
    attn_sink=None, descale_q=None, descale_k=None, backend=BACKEND)
big copies: 0""",
    )
