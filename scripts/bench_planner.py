"""Measure what mla_decode's outputs in Inductor's memory plan would bring: time and peak memory.

One model compiled four ways: with the functional operator, which allocates its outputs itself,
and with buffers that Inductor allocates (what a lowering to mla_decode_out would make of it), each
with and without Inductor's pooled planner. On a GPU under reduce-overhead. Results are compared
before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from _record import environment
from torch import nn

from mla_ops import MLAMetadataBuffers, PagedKVCache, mla_decode
from mla_ops.shapes import lse_strides

LATENT, ROPE = 512, 64


class Model(nn.Module):
    """Attention with its two projections: the activations that share memory with the outputs."""

    def __init__(self, options: argparse.Namespace, *, planned: bool) -> None:
        super().__init__()
        self.planned, self.backend, self.heads = planned, options.backend, options.heads
        torch.manual_seed(0)
        with torch.device(options.device):
            self.cache = PagedKVCache(
                *(options.layers, options.batch, options.length), latent_dim=LATENT, rope_dim=ROPE
            )
            self.metadata = MLAMetadataBuffers(options.batch, num_heads_q=self.heads)
            widths = (options.hidden, self.heads * (LATENT + ROPE), self.heads * LATENT)
            self.queries = self._weights(options.layers, widths[1], widths[0])
            self.outputs = self._weights(options.layers, widths[0], widths[2])
        for row in range(options.batch):
            self.cache.allocate(row, options.length)
        for layer in range(options.layers):
            self.cache.kv_cache(layer).normal_()
        self.cache.cache_seqlens.fill_(options.length)

    @staticmethod
    def _weights(layers: int, rows: int, columns: int) -> nn.ParameterList:
        return nn.ParameterList(
            nn.Parameter((torch.randn(rows, columns) / columns**0.5).bfloat16(), False)
            for _ in range(layers)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, cache = hidden.shape[0], self.cache
        plan = self.metadata.update(cache.cache_seqlens)
        for layer, (query, output) in enumerate(zip(self.queries, self.outputs, strict=True)):
            q = (hidden @ query.t()).view(batch, 1, self.heads, LATENT + ROPE)
            given = {}
            if self.planned:
                given["out"] = q.new_empty((batch, 1, self.heads, LATENT))
                shape, strides = (batch, self.heads, 1), lse_strides(1, self.heads)
                given["lse"] = q.new_empty_strided(shape, strides, dtype=torch.float32)
            out = mla_decode(
                *(q, cache.kv_cache(layer), cache.block_table, cache.cache_seqlens, plan),
                softmax_scale=0.1,
                backend=self.backend,
                **given,
            ).out
            hidden = hidden + out.flatten(1) @ output.t()
        return hidden


def peak_bytes(step, device: str) -> int:
    """Return the most memory that one step holds beyond what was there before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def step_us(step, device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def measure(options: argparse.Namespace, hidden: torch.Tensor, *, planned: bool, pooled: bool):
    """Return the result of one way to compile the model, and its figures."""
    torch._dynamo.reset()
    model = Model(options, planned=planned)
    mode = "reduce-overhead" if options.device == "cuda" else None
    with torch._inductor.config.patch(memory_planning=pooled), torch.inference_mode():
        compiled = torch.compile(model, mode=mode, fullgraph=True)
        # Under reduce-overhead: warm up, record, replay.
        peak = peak_bytes(lambda: compiled(hidden), options.device)
        result = [compiled(hidden).clone() for _ in range(3)][-1]
        if options.device == "cpu":
            peak = peak_bytes(lambda: compiled(hidden), options.device)
        micros = step_us(lambda: compiled(hidden), options.device, options.repeats)
    return result, {
        "outputs": "Inductor's" if planned else "the operator's",
        "pooled": pooled,
        "step_us": round(micros, 1),
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    for name, value in (("layers", 4), ("batch", 8), ("heads", 16), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hidden = torch.randn(options.batch, options.hidden).bfloat16().to(options.device)
    expected, records = None, []
    for planned in (False, True):
        for pooled in (False, True):
            result, record = measure(options, hidden, planned=planned, pooled=pooled)
            expected = result if expected is None else expected
            torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
            records.append(record)
            print(record, flush=True)
    if options.json:
        shape = {key: value for key, value in vars(options).items() if key != "json"}
        record = {"environment": environment(), "shape": shape, "ways": records}
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
