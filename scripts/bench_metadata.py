"""Time of the scheduler and of append_kv_ in a CUDA graph, against FlashMLA's own scheduler.

Every result is first compared, bit for bit, with the reference on the same inputs; numbers of a
wrong result are not printed. Each graph holds many launches: the time is the median over replays
of one launch, the gap to the next one included. Ratios above 1 mean that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _record import environment

from mla_ops.backends import reference
from mla_ops.backends.triton.append import append_kv_
from mla_ops.backends.triton.metadata import mla_metadata_out
from mla_ops.cli.bench_timing import pools_needed, replay_us
from mla_ops.shapes import SPLIT_OVERHEAD_BLOCKS, num_sm_parts

BATCHES = (1, 2, 8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
ROWS = (1, 32, 128, 512)
LAUNCHES = 50
HEADS = 16
# B up to the first number must take at most so many us.
TARGETS = ((128, 5.0), (512, 10.0))
APPEND_TARGET = (128, 3.0)


def equal(batch: int) -> list[int]:
    return [4096] * batch


def ragged(batch: int) -> list[int]:
    rng = random.Random(batch)
    return [rng.randint(0, 16384) for _ in range(batch)]


def short(batch: int) -> list[int]:
    """Return the hardest lengths: nearly every part ends at a request of its own distance."""
    rng = random.Random(batch)
    return [rng.randint(1, 200) for _ in range(batch)]


REGIMES: dict[str, Callable[[int], list[int]]] = {"equal": equal, "ragged": ragged, "short": short}


def plan(
    function: Callable[..., None], lengths: torch.Tensor, parts: int, schedule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.full((parts, 8), -7, dtype=torch.int32, device=lengths.device)
    splits = torch.full((lengths.numel() + 1,), -7, dtype=torch.int32, device=lengths.device)
    options = {"overhead": SPLIT_OVERHEAD_BLOCKS, "topk": None, "topk_length": None}
    function(lengths, rows, splits, schedule=schedule, **options)
    return rows, splits


def flash_mla_planner() -> Callable[[torch.Tensor], object] | None:
    """Return FlashMLA's own scheduler, which allocates its results, or None if it is absent."""
    try:
        import flash_mla  # noqa: F401

        own = torch.ops.flash_mla_legacy.get_mla_decoding_metadata
    except (ImportError, AttributeError) as error:
        print(f"flash_mla is not measured: {error}", flush=True)
        return None
    return lambda lengths: own(lengths, HEADS, 1, HEADS, False, None)


def verify(lengths: torch.Tensor, parts: int) -> None:
    """Compare both schedules with the reference, on lengths as they will be timed."""
    for schedule in ("flash_mla", "balanced"):
        ours = plan(mla_metadata_out, lengths, parts, schedule)
        expected = plan(reference.mla_metadata_out, lengths.cpu(), parts, schedule)
        for name, got, want in zip(("rows", "num_splits"), ours, expected, strict=True):
            if not torch.equal(got.cpu(), want):
                raise SystemExit(f"{schedule} B={lengths.numel()}: {name} differ, no time printed")


def same_as_flash_mla(own: object, lengths: torch.Tensor, parts: int) -> bool:
    """Compare with FlashMLA itself but for idle rows and int 7, where it leaves junk."""
    rows, splits = plan(mla_metadata_out, lengths, parts, "flash_mla")
    theirs, their_splits = own
    busy = rows[:, 0] < lengths.numel()
    return torch.equal(theirs[busy, :7], rows[busy, :7]) and torch.equal(their_splits, splits)


def measure_metadata(
    regime: str, batch: int, own: Callable[[torch.Tensor], object] | None
) -> dict[str, object]:
    lengths = torch.tensor(REGIMES[regime](batch), dtype=torch.int32, device="cuda")
    multiprocessors = torch.cuda.get_device_properties(lengths.device).multi_processor_count
    parts = num_sm_parts(multiprocessors, num_heads_q=HEADS, seqlen_q=1)
    verify(lengths, parts)
    rows, splits = plan(mla_metadata_out, lengths, parts, "flash_mla")
    options = {"overhead": SPLIT_OVERHEAD_BLOCKS, "topk": None, "topk_length": None}
    result: dict[str, object] = {"regime": regime, "b": batch, "parts": parts}
    for schedule in ("flash_mla", "balanced"):
        result[schedule] = replay_us(
            [lambda s=schedule: mla_metadata_out(lengths, rows, splits, schedule=s, **options)]
            * LAUNCHES
        )
    # Its shared memory holds about 11,600 requests.
    if own is not None and batch <= 8192:
        result["equal_to_flash_mla"] = same_as_flash_mla(own(lengths), lengths, parts)
        result["FM"] = replay_us([lambda: own(lengths)] * LAUNCHES)
    return result


def metadata_row(result: dict[str, object]) -> str:
    batch, ours = int(result["b"]), float(result["flash_mla"])
    text = f"{result['regime']:>7} B={batch:<6} ours {ours:6.2f} us"
    text += f"  balanced {result['balanced']:6.2f} us"
    if "FM" in result:
        fm = float(result["FM"])
        text += f"  flash_mla {fm:6.2f} us  ratio {fm / ours:5.1f}"
        text += "  bit-exact" if result["equal_to_flash_mla"] else "  DIFFERS FROM flash_mla"
    limit = next((us for most, us in TARGETS if batch <= most), None)
    if limit is not None:
        text += f"  target {limit:g}: {'met' if ours <= limit else 'MISSED'}"
    return text


def measure_append(count: int) -> dict[str, float]:
    """Time ``count`` tokens into slots spread over pools that L2 does not hold together."""
    pages = 4096
    pools = pools_needed(pages * 64 * 1152, most=4)
    kv = torch.zeros((pools, pages, 64, 1, 576), device="cuda", dtype=torch.bfloat16)
    kv_c = torch.randn((count, 512), device="cuda", dtype=torch.bfloat16)
    k_pe = torch.randn((count, 64), device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(pages * 64, device="cuda")[:count]
    slots[count // 2] = -1 if count > 1 else slots[0]
    append_kv_(kv[0], kv_c, k_pe, slots)
    expected = torch.zeros_like(kv[0])
    kept = slots >= 0
    expected.view(-1, 576)[slots[kept]] = torch.cat((kv_c, k_pe), 1)[kept]
    if not torch.equal(kv[0], expected):
        raise SystemExit(f"append_kv_ of {count} rows differs, no time is printed")
    launches = [lambda pool=pool: append_kv_(pool, kv_c, k_pe, slots) for pool in kv]
    return {"rows": count, "us": replay_us(launches * (LAUNCHES // pools))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_metadata: a CUDA device is needed")
    own = flash_mla_planner()
    metadata = []
    for regime in REGIMES:
        for batch in BATCHES:
            metadata.append(measure_metadata(regime, batch, own))
            print(metadata_row(metadata[-1]), flush=True)
    append = [measure_append(count) for count in ROWS]
    for result in append:
        count, us = result["rows"], result["us"]
        verdict = ""
        if count <= APPEND_TARGET[0]:
            verdict = f"  target {APPEND_TARGET[1]:g}: "
            verdict += "met" if us <= APPEND_TARGET[1] else "MISSED"
        print(f"append_kv_ {count:4} rows {us:6.2f} us{verdict}", flush=True)
    if args.json:
        record = {**environment(), "metadata": metadata, "append": append}
        args.json.write_text(json.dumps(record, indent=1))
    if any(result.get("equal_to_flash_mla") is False for result in metadata):
        sys.exit("bench_metadata: the schedule differs from flash_mla's own")


if __name__ == "__main__":
    main()
