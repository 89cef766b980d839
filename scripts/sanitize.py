"""The scenario of the fault this project began with, to be run under compute-sanitizer.

A small batch, a larger one, a padded dummy batch, then steps of the largest batch with fewer live
rows: replays of one graph, or, with ``--no-graph``, eager calls. PYTORCH_NO_CUDA_MEMORY_CACHING=1
makes every tensor an allocation of its own, so that a read past its end is seen; it forbids
allocations during a capture, hence ``--no-graph``. ``--plant`` makes a deliberate read past the
end of a tensor, to see that the checker would tell.
"""

from __future__ import annotations

import argparse
import sys

import torch

import mla_ops
from mla_ops.backends import reference

BATCH, MAX_LEN, HEADS, SCALE = 16, 256, 16, 0.135234
LIVE = (16, 9, 1, 12, 3)


class Scenario:
    """One layer's cache, schedule and inputs."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.cache = mla_ops.PagedKVCache(1, BATCH, MAX_LEN, device="cuda")
        self.schedule = mla_ops.MLAMetadataBuffers(BATCH, num_heads_q=HEADS, device="cuda")
        self.cache.kv_cache(0).normal_()
        for row in range(BATCH):
            self.cache.allocate(row, MAX_LEN)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn((BATCH, 1, HEADS, 576), **options)
        self.kv_c = torch.randn((BATCH, 512), **options)
        self.k_pe = torch.randn((BATCH, 64), **options)

    def step(self, batch: int) -> mla_ops.MLAOutput:
        slots = self.cache.advance_(batch)
        lengths = self.cache.cache_seqlens[:batch]
        metadata = self.schedule.update(lengths)
        self.cache.append_(0, self.kv_c[:batch], self.k_pe[:batch], slots)
        return mla_ops.mla_decode(
            *(self.q[:batch], self.cache.kv_cache(0), self.cache.block_table[:batch]),
            *(lengths, metadata),
            softmax_scale=SCALE,
            backend=self.backend,
        )

    def set_live(self, live: int) -> None:
        lengths = [(41 * row) % 200 + (row < live) for row in range(BATCH)]
        self.cache.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.cache.cache_seqlens[live:] = 0
        self.cache.capacity.fill_(MAX_LEN)
        self.cache.capacity[live:] = 0

    def check(self, result: mla_ops.MLAOutput, live: int) -> None:
        batch = result.out.shape[0]
        out = torch.empty(result.out.shape, dtype=torch.float64, device="cuda")
        lse = torch.empty(result.lse.shape, dtype=torch.float64, device="cuda")
        reference.mla_decode_out(
            *(self.q[:batch].double(), self.cache.kv_cache(0).double()),
            *(self.cache.block_table[:batch], self.cache.cache_seqlens[:batch], None, None),
            *(out, lse),
            softmax_scale=SCALE,
            causal=True,
            attn_sink=None,
        )
        error = (result.out.double() - out).square().mean().sqrt()
        assert error <= 5e-3 * out.square().mean().sqrt(), f"out is off by {error}"
        assert torch.allclose(result.lse.double(), lse, atol=1e-3)
        assert (result.out[live:] == 0).all()
        assert (result.lse[live:] == -torch.inf).all()


def run(backend: str, *, with_graph: bool) -> None:
    scenario = Scenario(backend)
    for batch in (2, 5, BATCH):
        scenario.set_live(BATCH)
        scenario.check(scenario.step(batch), batch)
    table = scenario.cache.block_table.clone()
    scenario.set_live(0)
    scenario.cache.block_table.zero_()
    scenario.check(scenario.step(BATCH), 0)
    if with_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = scenario.step(BATCH)
    for live in LIVE:
        scenario.set_live(live)
        scenario.cache.block_table.copy_(table)
        scenario.cache.block_table[live:] = 0
        if with_graph:
            graph.replay()
        else:
            result = scenario.step(BATCH)
        scenario.check(result, live)
    torch.cuda.synchronize()
    print(f"{backend}: ran", flush=True)


def plant() -> None:
    """Decode with a table that is shorter than the lengths: FlashMLA reads past its end."""
    scenario = Scenario("flash_mla")
    scenario.set_live(BATCH)
    lengths = torch.full((BATCH,), 64 * 4096, dtype=torch.int32, device="cuda")
    metadata = scenario.schedule.update(lengths)
    table = torch.zeros((BATCH, 1), dtype=torch.int32, device="cuda")
    mla_ops.mla_decode(
        *(scenario.q, scenario.cache.kv_cache(0), table, lengths, metadata),
        softmax_scale=SCALE,
        backend="flash_mla",
    )
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--plant", action="store_true")
    args = parser.parse_args()
    with torch.inference_mode():
        if args.plant:
            plant()
            return
        for backend in args.backend or ("flash_mla", "gluon", "triton"):
            run(backend, with_graph=not args.no_graph)


if __name__ == "__main__":
    sys.exit(main())
