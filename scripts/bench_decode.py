"""Time of one decode by every backend that runs here, against FlashMLA and the ceilings.

Each time is the median of CUDA-graph replays over KV rotated through more than L2 holds (or 64
pools of the smallest shapes); the backends of a shape take turns. What a replay of that very graph
leaves is compared with float64 before it is timed: out and lse of every sequence over every pool,
FlashMLA's too. A wrong result ends the run, and its shape has no number. Ratios above 1 mean that
ours is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _record import environment

from mla_ops.cli.bench_check import Oracle
from mla_ops.cli.bench_step import DecodeStep, StepShape
from mla_ops.cli.bench_timing import Ceilings, ceilings, compare_us, pools_needed
from mla_ops.ops._selection import reasons_against

# us of vLLM's Triton MLA kernel on an H200, and the ratio the portable kernel must reach.
VLLM = {
    (1, 16, 1024): (50, 6.0),
    (1, 16, 4096): (52, 5.0),
    (1, 16, 16384): (69, 4.2),
    (8, 16, 4096): (65, 3.0),
    (32, 16, 4096): (96, 1.9),
    (128, 16, 4096): (350, 2.2),
    (32, 64, 4096): (315, 3.0),
    (1, 128, 16384): (89, 2.8),
    (32, 128, 4096): (600, 3.1),
    (128, 128, 4096): (2525, 3.6),
}
# The ratio to FlashMLA that the Gluon kernel must reach.
GLUON = {
    (1, 16, 1024): 1.6,
    (1, 16, 4096): 2.6,
    (1, 16, 16384): 3.0,
    (1, 16, 131072): 1.5,
    (8, 16, 1024): 1.25,
    (8, 16, 4096): 1.2,
    (8, 16, 16384): 1.0,
    (32, 16, 1024): 1.1,
    (32, 16, 4096): 1.0,
    (32, 16, 16384): 0.98,
    (128, 16, 4096): 0.95,
    (1, 64, 16384): 1.6,
    (1, 128, 16384): 1.35,
}
SCALE = 0.135234
# With auto among them, which the sweep compares with the best of the others.
BACKENDS = "triton,gluon,flash_mla,auto"

Launch = Callable[[], tuple[torch.Tensor, ...]]
# B, H, tokens a sequence, and S where it is not 1.
Shape = tuple[int, ...]


def sizes_of(shape: Shape) -> StepShape:
    batch, heads, length, seqlen_q = (*shape, 1)[:4]
    return StepShape(batch, heads, length, softmax_scale=SCALE, seqlen_q=seqlen_q)


class Inputs(DecodeStep):
    """One shape's tensors: pools to rotate through, shuffled pages, random values."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        sizes = sizes_of(shape)
        pools = pools_needed(sizes.moved_bytes(torch.bfloat16))
        where = torch.device(device)
        super().__init__(sizes, num_pools=pools, device=where, dtype=torch.bfloat16)

    def refuses(self, backend: str) -> list[str]:
        return reasons_against(backend, self.shape.decode_shape(self.q.device, self.q.dtype))

    def launch(self, pool: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator itself, as a compiled model that does not use lse."""
        out, lse = torch.ops.mla_ops.mla_decode(
            *(self.q, pool, self.table, self.lengths, self.schedule, self.splits, SCALE, 512),
            *(True, None, None, None, backend),
        )
        return out, lse

    def launches(self, backend: str) -> list[Launch]:
        """Return a call for each pool, of FlashMLA's own kernel if ``backend`` is ``FM``."""
        if backend == "FM":
            return flash_mla_launches(self)
        return [lambda pool=pool: self.launch(pool, backend) for pool in self.kv]


def flash_mla_launches(inputs: Inputs) -> list[Launch]:
    """Return calls of FlashMLA's own kernel with its own schedule, computed beforehand."""
    _, seqlen_q, heads, _ = inputs.q.shape
    meta, splits = torch.ops.flash_mla_legacy.get_mla_decoding_metadata(
        inputs.lengths, seqlen_q * heads, 1, heads, False, None
    )
    decode = torch.ops.flash_mla_legacy.dense_decode_fwd
    return [
        lambda pool=pool: decode(
            *(inputs.q, pool, 512, inputs.lengths, inputs.table, SCALE, True, meta, splits)
        )[:2]
        for pool in inputs.kv
    ]


def measure(shape: Shape, backends: list[str], device: str = "cuda") -> dict[str, float]:
    """Return us by backend, FlashMLA with its own schedule as ``FM``.

    Raises:
        SystemExit: a result is wrong.
    """
    inputs = Inputs(shape, device)
    oracle = Oracle(inputs)

    def check(name: str, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        problem = oracle.verdict(results).problem
        if problem is not None:
            raise SystemExit(f"{name} {shape}: {problem}; no time is printed")

    names = [
        name
        for name in ("FM", *backends)
        if name == "auto" or not inputs.refuses("flash_mla" if name == "FM" else name)
    ]
    sides = [inputs.launches(name) for name in names]
    checks = [functools.partial(check, name) for name in names]
    return dict(zip(names, compare_us(sides, checks=checks), strict=True))


def sweep_shapes() -> list[tuple[int, int, int]]:
    """Return batch, heads and length of every shape that auto-dispatch is fitted to."""
    return [
        (b, h, k)
        for h in (8, 16, 32, 64, 128)
        for b in (1, 2, 4, 8, 16, 32, 64, 128)
        for k in (512, 2048, 8192, 32768, 131072)
    ]


def row(shape: Shape, times: dict[str, float], peak: Ceilings) -> str:
    sizes = sizes_of(shape)
    moved, done = sizes.moved_bytes(torch.bfloat16), sizes.operations
    floor = peak.roof_us(moved, done)
    cells = [f"{shape!s:>18} roof {floor:7.1f}"]
    for name, us in times.items():
        text = f"{name} {us:7.1f}us {moved / us * 1e-3:5.0f}GB/s {done / us * 1e-6:4.0f}TF"
        text += f" {100 * floor / us:3.0f}%"
        if name != "FM" and "FM" in times:
            text += f" FM/ours {times['FM'] / us:.2f}"
        if name == "gluon" and shape in GLUON:
            text += f" (must {GLUON[shape]})"
        if name == "triton" and shape in VLLM:
            vllm, must = VLLM[shape]
            text += f" vLLM/ours {vllm / us:.2f} (must {must})"
        cells.append(text)
    return " | ".join(cells)


def plot(results: list[dict], peak: Ceilings, path: Path) -> None:
    """Draw time over length, a panel for each number of heads (down) and batch size (across)."""
    from matplotlib.figure import Figure

    heads, batches = (sorted({result[name] for result in results}) for name in "hb")
    names = list(dict.fromkeys(name for result in results for name in result["us"]))
    figure = Figure(figsize=(3 * len(batches) + 1, 2.6 * len(heads) + 0.5), layout="constrained")
    panels = figure.subplots(len(heads), len(batches), squeeze=False, sharex=True)
    for h, line in zip(heads, panels, strict=True):
        for batch, panel in zip(batches, line, strict=True):
            here = sorted(
                (r for r in results if (r["h"], r["b"]) == (h, batch)), key=lambda r: r["k"]
            )
            for index, name in enumerate(names):
                points = [(r["k"], r["us"][name]) for r in here if name in r["us"]]
                if points:
                    panel.plot(
                        *zip(*points, strict=True), "o-", ms=3, color=f"C{index}", label=name
                    )
            sizes = [StepShape(batch, h, r["k"]) for r in here]
            roof = [
                peak.roof_us(each.moved_bytes(torch.bfloat16), each.operations) for each in sizes
            ]
            panel.plot([each.length for each in sizes], roof, "k:", label="roof")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_title(f"batch {batch}, {h} heads", fontsize=8)
    figure.supxlabel("cached tokens of a sequence")
    figure.supylabel("us")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


def print_mean(name: str, ratios: list[float]) -> None:
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geomean {name} over {len(ratios)}: {mean:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", help="b,h,k or b,h,k,s; ... (default: the acceptance table)")
    parser.add_argument("--sweep", action="store_true", help="the grid auto-dispatch is fitted to")
    parser.add_argument("--backends", default=BACKENDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_decode: a CUDA device is needed (scripts/bench_cpu.py measures the CPU)")
    shapes = list({**VLLM, **GLUON})
    if args.shapes:
        shapes = [tuple(map(int, text.split(","))) for text in args.shapes.split(";")]
    if args.sweep:
        shapes = sweep_shapes()
    peak = ceilings(torch.device("cuda"))
    print(f"copy {peak[0]:.0f} GB/s, bf16 {peak[1]:.0f} TFLOP/s", flush=True)
    results = []
    for shape in shapes:
        times = measure(shape, args.backends.split(","))
        print(row(shape, times, peak), flush=True)
        results.append({**dict(zip("bhks", (*shape, 1), strict=False)), "us": times})
    found = dict(zip(shapes, (result["us"] for result in results), strict=True))
    known = [s for s in VLLM if "triton" in found.get(s, ())]
    print_mean("vLLM/triton", [VLLM[s][0] / found[s]["triton"] for s in known])
    known = [s for s in GLUON if s[1] == 16 and {"FM", "gluon"} <= found.get(s, {}).keys()]
    print_mean("FM/gluon, h=16", [found[s]["FM"] / found[s]["gluon"] for s in known])
    if args.json:
        record = {**environment(), "copy_gb_s": peak[0], "bf16_tflop_s": peak[1]}
        args.json.write_text(json.dumps({**record, "results": results}, indent=1))
    if args.plot:
        plot(results, peak, args.plot)


if __name__ == "__main__":
    main()
