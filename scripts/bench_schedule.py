"""FlashMLA's time over the number of busy SM parts: what the balanced schedule is fitted to.

Prints for each (batch, heads, length) the time of the unmodified kernel with its own schedule and
with fewer parts, the rest idle. Metadata is computed beforehand on both sides.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from _record import environment
from _timing import pools_needed, replay_us

import mla_ops
from mla_ops.backends import reference
from mla_ops.shapes import IDLE_REQUEST

PARTS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 132)


def with_parts(lengths: torch.Tensor, rows: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FlashMLA's schedule over the first ``parts`` of ``rows`` parts."""
    meta = torch.zeros((rows, 8), dtype=torch.int32)
    meta[:, 0] = IDLE_REQUEST
    splits = torch.zeros((lengths.numel() + 1,), dtype=torch.int32)
    reference.mla_metadata_out(
        *(lengths.cpu(), meta[:parts], splits),
        overhead=5,
        topk=None,
        topk_length=None,
        schedule="flash_mla",
    )
    return meta.cuda(), splits.cuda()


def measure(batch: int, heads: int, lengths: torch.Tensor, rows: int) -> dict[int, float]:
    longest = int(lengths.max())
    pages = -(-longest // 64)
    pools = pools_needed(int(lengths.sum()) * 1152)
    kv = torch.randn((pools, batch * pages, 64, 1, 576), device="cuda", dtype=torch.bfloat16)
    q = torch.randn((batch, 1, heads, 576), device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    device_lengths = lengths.cuda()
    decode = torch.ops.flash_mla_legacy.dense_decode_fwd
    times = {}
    for parts in (*(p for p in PARTS if p < rows), rows):
        meta, splits = with_parts(lengths, rows, parts)
        launches = [
            lambda pool=pool, meta=meta, splits=splits: decode(
                q, pool, 512, device_lengths, table, 0.1, False, meta, splits
            )
            for pool in kv
        ]
        times[parts] = replay_us(launches, repeats=8)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import flash_mla  # noqa: F401

    results = []
    for heads in (16, 64, 128):
        rows = mla_ops.shapes.num_sm_parts(132, num_heads_q=heads, seqlen_q=1)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128):
            for length in (1024, 4096, 16384, 65536):
                if batch * length > 2**22:
                    continue
                lengths = torch.full((batch,), length, dtype=torch.int32)
                times = measure(batch, heads, lengths, rows)
                best = min(times, key=times.__getitem__)
                own = times[rows]
                print(
                    f"b={batch} h={heads} k={length} own {own:.1f} best {times[best]:.1f} at "
                    f"{best} ratio {own / times[best]:.2f} "
                    + " ".join(f"{p}:{t:.1f}" for p, t in times.items()),
                    flush=True,
                )
                results.append({"b": batch, "h": heads, "k": length, "us": times})
                torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({**environment(), "results": results}))


if __name__ == "__main__":
    sys.exit(main())
