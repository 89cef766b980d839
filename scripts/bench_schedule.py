"""The unmodified FlashMLA kernel with the balanced schedule against its own.

Metadata is computed beforehand on both sides and replays alternate; results are compared before
they are timed. Ratios above 1 mean that ours is faster; equal schedules are not timed twice.
``--fit`` prints instead the kernel's time over the number of busy parts, the rest idle: what the
balanced schedule is fitted to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _record import environment

import mla_ops
from mla_ops.backends import reference
from mla_ops.cli.bench_timing import compare_us, pools_needed, replay_us
from mla_ops.shapes import IDLE_REQUEST

Outputs = tuple[torch.Tensor, ...]
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


class Call:
    """One shape's tensors: pools to rotate through, shuffled pages, random values."""

    def __init__(self, heads: int, lengths: torch.Tensor) -> None:
        batch, pages = lengths.numel(), -(-int(lengths.max()) // 64)
        pools = pools_needed(int(lengths.sum()) * 1152)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.kv = torch.randn((pools, batch * pages, 64, 1, 576), **options)
        self.q = torch.randn((batch, 1, heads, 576), **options)
        self.table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        self.lengths = lengths.cuda()

    def launches(self, meta: torch.Tensor, splits: torch.Tensor) -> list[Callable[[], Outputs]]:
        decode = torch.ops.flash_mla_legacy.dense_decode_fwd
        return [
            lambda pool=pool: decode(
                *(self.q, pool, 512, self.lengths, self.table, 0.1, False, meta, splits)
            )
            for pool in self.kv
        ]


def fit(heads: int, lengths: torch.Tensor, rows: int) -> dict[int, float]:
    call = Call(heads, lengths)
    times = {}
    for parts in (*(p for p in PARTS if p < rows), rows):
        times[parts] = replay_us(call.launches(*with_parts(lengths, rows, parts)), repeats=8)
    return times


def compare(heads: int, lengths: torch.Tensor) -> tuple[float, float]:
    """Return us with FlashMLA's own schedule and with the balanced one."""
    call = Call(heads, lengths)
    own = torch.ops.flash_mla_legacy.get_mla_decoding_metadata(
        call.lengths, heads, 1, heads, False, None
    )
    ours = mla_ops.mla_metadata(call.lengths, num_heads_q=heads, schedule="balanced")
    mine, theirs = call.launches(*ours), call.launches(*own)
    (out, lse), (expected, expected_lse) = mine[0]()[:2], theirs[0]()[:2]
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    if not (error < 5e-3 and torch.allclose(lse, expected_lse, atol=1e-3)):
        raise SystemExit(f"h={heads} b={lengths.numel()}: results differ, no time is printed")
    same = mla_ops.mla_metadata(call.lengths, num_heads_q=heads, schedule="flash_mla")
    if torch.equal(same.tile_scheduler_metadata, ours.tile_scheduler_metadata):
        us = replay_us(theirs)
        return us, us
    own_us, ours_us = compare_us([theirs, mine])
    return own_us, ours_us


def shapes(*, mixed: bool) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Yield (batch, heads, length, lengths), every other row an eighth as long where mixed."""
    for heads in (16, 64, 128):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128):
            for length in (1024, 4096, 16384, 65536):
                if batch * length > 2**22 or (mixed and batch == 1):
                    continue
                lengths = torch.full((batch,), length, dtype=torch.int32)
                if mixed:
                    lengths[1::2] = length // 8
                yield batch, heads, length, lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    import flash_mla  # noqa: F401

    results = []
    for mixed in (False,) if args.fit else (False, True):
        for batch, heads, length, lengths in shapes(mixed=mixed):
            named = {"b": batch, "h": heads, "k": length, "mixed": mixed}
            if args.fit:
                rows = mla_ops.shapes.num_sm_parts(132, num_heads_q=heads, seqlen_q=1)
                times = fit(heads, lengths, rows)
                best = min(times, key=times.__getitem__)
                ratio = times[rows] / times[best]
                print(named, f"own {times[rows]:.1f} best {times[best]:.1f} at {best}", end=" ")
                results.append({**named, "us": times})
            else:
                own, ours = compare(heads, lengths)
                ratio = own / ours
                print(named, f"own {own:.1f} balanced {ours:.1f}", end=" ")
                results.append({**named, "own_us": own, "balanced_us": ours})
            print(f"ratio {ratio:.3f}", flush=True)
            torch.cuda.empty_cache()
    if not args.fit:
        below = [r for r in results if r["own_us"] < 0.99 * r["balanced_us"]]
        print(f"{len(below)} of {len(results)} below 0.99", *below, sep="\n")
    if args.json:
        args.json.write_text(json.dumps({**environment(), "results": results}))


if __name__ == "__main__":
    sys.exit(main())
