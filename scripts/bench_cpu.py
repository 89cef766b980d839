"""The cpu backend against scaled_dot_product_attention, sequence by sequence, on the same inputs.

Prints ms and the ratio (above 1: ours is faster) after comparing both with float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _record import environment
from torch.nn.functional import scaled_dot_product_attention

import mla_ops

SCALE = 0.135234


def median_ms(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    batch, heads, pages = args.batch, args.heads, -(-args.length // 64)
    kv_cache = torch.randn(batch * pages, 64, 1, 576).bfloat16()
    q = torch.randn(batch, 1, heads, 576).bfloat16()
    table = torch.randperm(batch * pages).int().view(batch, pages)
    lengths = torch.full((batch,), args.length, dtype=torch.int32)

    def ours() -> torch.Tensor:
        return mla_ops.mla_decode(q, kv_cache, table, lengths, softmax_scale=SCALE).out

    def sdpa() -> torch.Tensor:
        # Values as wide as keys: SDPA's fast CPU kernel wants equal widths.
        outs = []
        for b in range(batch):
            keys = kv_cache[table[b]].view(1, 1, -1, 576)[:, :, : args.length]
            outs.append(scaled_dot_product_attention(q[b, None], keys, keys, scale=SCALE))
        return torch.cat(outs)[..., :512]

    with torch.inference_mode():
        expected = mla_ops.mla_decode(
            q.double(), kv_cache.double(), table, lengths, softmax_scale=SCALE
        ).out
        for name, run in (("cpu", ours), ("sdpa", sdpa)):
            error = float((run().double() - expected).norm() / expected.norm())
            if not error <= 5e-3:
                sys.exit(f"{name}: relative error {error:.2e}, no time is printed")
        times = {"cpu": median_ms(ours, args.repeats), "sdpa": median_ms(sdpa, args.repeats)}
    ratio = times["sdpa"] / times["cpu"]
    print(f"b={batch} h={heads} k={args.length} bf16, {torch.get_num_threads()} threads")
    print(f"cpu {times['cpu']:.2f} ms, SDPA per sequence {times['sdpa']:.2f} ms, x{ratio:.2f}")
    if args.json:
        args.json.write_text(json.dumps({**environment(), "ms": times, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main()
