"""What the tests on a Hopper GPU share: a model, an oracle, guarded memory, counted launches."""

import contextlib
from collections import Counter

import torch
from torch import nn

import mla_ops
from mla_ops.backends import reference
from mla_ops.ops import _decode_plan, _selection
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64

SCALE = 0.135234
PAGE = 64
GUARD = 4096
PATTERN = 0x5A


class Layers(nn.Module):
    """Decode layers over one cache: only our operators and copies, so that bits can be compared.

    Pools are filled with random keys: any length and any table then has something to read.
    """

    def __init__(
        self, layers, batch, max_len, *, heads=16, seqlen_q=1, backend="flash_mla", dtype=None
    ):
        super().__init__()
        dtype = dtype or torch.bfloat16
        self.layers, self.batch, self.heads, self.seqlen_q = layers, batch, heads, seqlen_q
        self.backend, self.dtype = backend, dtype
        self.cache = mla_ops.PagedKVCache(layers, batch, max_len, dtype=dtype, device="cuda")
        self.schedule = mla_ops.MLAMetadataBuffers(
            batch, num_heads_q=heads, max_seqlen_q=seqlen_q, device="cuda"
        )
        generator = torch.Generator("cuda").manual_seed(11)
        for layer in range(layers):
            self.cache.kv_cache(layer).normal_(generator=generator)
        for row in range(batch):
            self.cache.allocate(row, max_len)

    def forward(self, q, kv_c, k_pe):
        """q [B, S, H, 576], kv_c [layers, B * S, 512], k_pe [layers, B * S, 64]."""
        slots = self.cache.advance_(self.batch, self.seqlen_q)
        metadata = self.schedule.update(self.cache.cache_seqlens, seqlen_q=self.seqlen_q)
        outs, lses = [], []
        for layer in range(self.layers):
            self.cache.append_(layer, kv_c[layer], k_pe[layer], slots)
            out, lse = mla_ops.mla_decode(
                *(q, self.cache.kv_cache(layer), self.cache.block_table),
                *(self.cache.cache_seqlens, metadata),
                softmax_scale=SCALE,
                backend=self.backend,
            )
            outs.append(out)
            lses.append(lse)
            q = torch.cat((out, q[..., 512:]), dim=-1)
        return torch.stack(outs), torch.stack(lses)

    def tokens(self):
        """Return static input tensors; ``renew`` writes the next step's values into them."""
        count = self.batch * self.seqlen_q
        return (
            torch.zeros((self.batch, self.seqlen_q, self.heads, 576), dtype=self.dtype).cuda(),
            torch.zeros((self.layers, count, 512), dtype=self.dtype).cuda(),
            torch.zeros((self.layers, count, 64), dtype=self.dtype).cuda(),
        )

    def set_lengths(self, lengths, live=None):
        """Set the lengths, dead rows (no capacity) at 0 with an empty table row of zeros."""
        lengths = torch.as_tensor(lengths, dtype=torch.int32)
        self.cache.cache_seqlens.copy_(lengths)
        self.cache.capacity.fill_(self.cache.max_seq_len)
        if live is not None:
            self.cache.capacity[live:] = 0
            self.cache.cache_seqlens[live:] = 0

    def shuffle_pages(self, seed):
        generator = torch.Generator().manual_seed(seed)
        pages = torch.randperm(self.cache.num_pages, generator=generator, dtype=torch.int32)
        self.cache.block_table.copy_(pages.view(self.cache.block_table.shape))

    def addresses(self):
        return {name: buffer.data_ptr() for name, buffer in self.named_buffers()}

    def check_against_oracle(self, q, outs, lses, layers=None):
        """Compare layers with float64 attention over what the caches hold now."""
        for layer in layers or range(self.layers):
            q_in = torch.cat((outs[layer - 1], q[..., 512:]), dim=-1) if layer else q
            arguments = (self.cache.kv_cache(layer), self.cache.block_table)
            check(q_in, *arguments, self.cache.cache_seqlens, outs[layer], lses[layer])


def renew(tokens, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    for tensor in tokens:
        tensor.normal_(generator=generator)


def oracle(q, pool, table, lengths, *, causal=True, zero_pages=False):
    """Return out and lse in float64, gathering one sequence at a time.

    ``zero_pages``: a page outside the pool reads as zeros, as flash_mla does; else it is absent.
    """
    batch, seqlen_q, heads, _ = q.shape
    out = torch.zeros((batch, seqlen_q, heads, 512), dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        used = -(-length // PAGE)
        if used == 0:
            continue
        pages = table[row, :used].long()
        inside = (pages >= 0) & (pages < pool.shape[0])
        keys = pool[pages.clamp(0, pool.shape[0] - 1)].double()
        numbers = torch.arange(used, dtype=torch.int32, device=q.device)
        if zero_pages:
            keys[~inside] = 0
        else:
            numbers[~inside] = -1
        reference.mla_decode_out(
            *(q[row : row + 1].double(), keys, numbers[None], lengths[row : row + 1], None, None),
            *(out[row : row + 1], lse[row : row + 1]),
            softmax_scale=SCALE,
            causal=causal,
            attn_sink=None,
        )
    return out, lse


def check(q, pool, table, lengths, out, lse, **options):
    expected, expected_lse = oracle(q, pool, table, lengths, **options)
    assert_close_to_fp64(out, expected)
    assert_lse_close_to_fp64(lse, expected_lse)
    empty = lengths == 0
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()


def assert_same_bits(actual, expected):
    for name, got, wanted in zip(("out", "lse"), actual, expected, strict=True):
        assert torch.equal(got, wanted), (
            f"{name} differs at {(got != wanted).nonzero()[:4].tolist()}"
        )


class Guarded:
    """Tensors with a pattern behind them, to see writes past their end.

    A tensor begins its memory: views of one that does not are refused in compiled regions.
    """

    def __init__(self):
        self._memory = []

    def __call__(self, like):
        """Copy ``like`` (contiguous) in front of a guard."""
        size = like.numel()
        memory = torch.full((size + GUARD,), PATTERN, dtype=like.dtype, device="cuda")
        self._memory.append((memory, size))
        return memory[:size].view(like.shape).copy_(like)

    def check(self):
        for memory, size in self._memory:
            assert (memory[size:] == PATTERN).all(), "written behind a buffer"


@contextlib.contextmanager
def counted_launches(monkeypatch):
    """Count how often Python enters a kernel function of any backend, by (backend, operator)."""
    entries = Counter()
    original = _selection.kernel

    def counted(function, name):
        def call(*args, **kwargs):
            entries[name] += 1
            return function(*args, **kwargs)

        return call

    def kernel(backend, op):
        function = original(backend, op)
        if op == "prepare_decode":
            return lambda *layout: counted(function(*layout), (backend, "mla_decode"))
        return counted(function, (backend, op))

    with monkeypatch.context() as patch:
        patch.setattr(_selection, "kernel", kernel)
        patch.setattr(_decode_plan, "kernel", kernel)
        _decode_plan.forget_plans()
        yield entries
    _decode_plan.forget_plans()


def cudagraph_or_error():
    return torch._inductor.config.patch({"triton.cudagraph_or_error": True})


def compiled(model):
    return torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)


def captured(model, tokens, stream=None, pool=None):
    """Record one step by hand; return the graph and the tensors each replay rewrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        result = model(*tokens)
    return graph, result
