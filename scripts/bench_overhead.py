"""What the operators cost on top of the kernels: in a graph, and in eager calls.

graph  compiled reduce-overhead steps over a hand-captured graph of raw ``dense_decode_fwd`` calls,
       with the same metadata and append kernels on both sides, 8 layers (needs a Hopper GPU).
eager  us that the operator, and ``mla_decode`` with its pass over lse, add to a raw
       ``dense_decode_fwd`` call, by mode of autograd (needs a Hopper GPU).
python us that ``mla_decode(..., out=, lse=)`` adds to a call of a kernel that does nothing, by
       mode of autograd (any machine).

Results of both sides are compared bit for bit before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import environment

import mla_ops
from mla_ops.backends import flash_mla
from mla_ops.backends.flash_mla_api import find_flash_mla
from mla_ops.ops import _decode_plan
from mla_ops.shapes import SPLIT_OVERHEAD_BLOCKS, num_sm_parts

SCALE = 0.135234
LAYERS = 8
SHAPES = ((8, 16, 4000), (64, 128, 4000))
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad mode": torch.enable_grad,
}


class Step(torch.nn.Module):
    """Metadata, then an append and a decode a layer; queries and tokens are buffers."""

    def __init__(self, batch: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.cache = mla_ops.PagedKVCache(LAYERS, batch, length + 64, device="cuda")
        self.schedule = mla_ops.MLAMetadataBuffers(batch, num_heads_q=heads, device="cuda")
        for layer in range(LAYERS):
            self.cache.kv_cache(layer).normal_()
        pages = torch.randperm(self.cache.num_pages, dtype=torch.int32)
        self.cache.block_table.copy_(pages.view(self.cache.block_table.shape))
        self.cache.cache_seqlens.fill_(length)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.register_buffer("q", torch.randn((LAYERS, batch, 1, heads, 576), **options))
        self.register_buffer("tokens", torch.randn((batch, 576), **options))
        pages_at_end = self.cache.block_table[:, (length - 1) // 64].long()
        self.register_buffer("slots", pages_at_end * 64 + (length - 1) % 64)

    q: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor

    def forward(self) -> list[torch.Tensor]:
        metadata = self.schedule.update(self.cache.cache_seqlens)
        outs = []
        for layer in range(LAYERS):
            pool = self.cache.kv_cache(layer)
            mla_ops.append_kv_(pool, self.tokens[:, :512], self.tokens[:, 512:], self.slots)
            result = mla_ops.mla_decode(
                *(self.q[layer], pool, self.cache.block_table, self.cache.cache_seqlens, metadata),
                softmax_scale=SCALE,
                backend="flash_mla",
            )
            outs.append(result.out)
        return outs

    def raw(self) -> list[torch.Tensor]:
        """Call the kernels themselves, as one writes it by hand."""
        from mla_ops.backends.triton.append import append_kv_
        from mla_ops.backends.triton.metadata import mla_metadata_out

        decode, lengths = raw_decode(), self.cache.cache_seqlens
        multiprocessors = torch.cuda.get_device_properties(lengths.device).multi_processor_count
        parts = num_sm_parts(multiprocessors, num_heads_q=self.heads, seqlen_q=1)
        rows = self.schedule.tile_scheduler_metadata[:parts]
        splits = self.schedule.num_splits[: lengths.shape[0] + 1]
        mla_metadata_out(
            *(lengths, rows, splits),
            overhead=SPLIT_OVERHEAD_BLOCKS,
            topk=None,
            topk_length=None,
            schedule="balanced",
        )
        outs = []
        for layer in range(LAYERS):
            pool = self.cache.kv_cache(layer)
            append_kv_(pool, self.tokens[:, :512], self.tokens[:, 512:], self.slots)
            outs.append(
                decode(
                    *(self.q[layer], pool, 512, lengths, self.cache.block_table),
                    *(SCALE, True, rows, splits),
                )[0]
            )
        return outs


def raw_decode() -> Callable[..., Any]:
    api = find_flash_mla().api
    if api is None or api.plan is not None:
        raise SystemExit("graph and eager need flash_mla with dense_decode_fwd")
    return api.decode


def packet(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator as flash_mla's own Python calls it: overloads not yet resolved."""
    namespace, _, name = str(getattr(operator, "_schema", "")).partition("(")[0].partition("::")
    return getattr(getattr(torch.ops, namespace), name) if name else operator


def graph_ratio(batch: int, heads: int, length: int) -> dict[str, float]:
    step = Step(batch, heads, length)
    with torch.no_grad():
        expected = [out.clone() for out in step.raw()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            by_hand = step.raw()
        with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
            compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
            for _ in range(4):
                outs = compiled()
            graph.replay()
            for ours, hand, eager in zip(outs, by_hand, expected, strict=True):
                if not (torch.equal(ours, eager) and torch.equal(hand, eager)):
                    raise SystemExit(f"{batch, heads, length}: results differ, no time is printed")
            # Interleaved, so that a change of clocks meets both.
            times: dict[str, list[float]] = {"compiled": [], "by_hand": []}
            for _ in range(15):
                times["by_hand"].append(gpu_us(graph.replay))
                times["compiled"].append(gpu_us(compiled))
    ours_us, hand_us = (statistics.median(times[name]) for name in ("compiled", "by_hand"))
    return {"compiled_us": ours_us, "by_hand_us": hand_us, "ratio": ours_us / hand_us}


def gpu_us(step: Callable[[], Any], repeats: int = 100) -> float:
    """Return the time of one of ``repeats`` back-to-back steps.

    Many of them: the GPU idles until the host has sent the first one.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def host_us(calls: dict[str, Callable[[], Any]], repeats: int, sync: bool) -> dict[str, float]:
    """Return the least mean time of each call as Python sees it; in turns, as hosts get busy."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(25):
        for name, call in calls.items():
            if sync:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            best[name] = min(best[name], (time.perf_counter() - begin) / repeats * 1e6)
    return best


def small_call(device: str) -> tuple[tuple[Any, ...], Any, Any]:
    """Return inputs of one short sequence, so that a GPU is done sooner than Python."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    inputs = (
        torch.randn((1, 1, 16, 576), **options),
        torch.randn((64, 64, 1, 576), **options),
        torch.zeros((1, 64), dtype=torch.int32, device=device),
        lengths,
        mla_ops.mla_metadata(lengths, num_heads_q=16),
    )
    return inputs, torch.empty((1, 1, 16, 512), **options), torch.empty((1, 16, 1), device=device)


def eager_added() -> dict[str, dict[str, float]]:
    (q, pool, table, lengths, metadata), out, lse = small_call("cuda")
    decode = packet(raw_decode())

    def raw() -> Any:
        return decode(q, pool, 512, lengths, table, SCALE, True, *metadata)

    operator = torch.ops.mla_ops.mla_decode.default
    arguments = (q, pool, table, lengths, *metadata, SCALE, 512, True, None, None, None)

    def called() -> Any:
        return operator(*arguments, "flash_mla")

    def ours(**outputs: torch.Tensor) -> Any:
        return mla_ops.mla_decode(
            *(q, pool, table, lengths, metadata),
            softmax_scale=SCALE,
            backend="flash_mla",
            **outputs,
        )

    results = {}
    for name, mode in MODES.items():
        with mode():
            if not torch.equal(raw()[0], ours().out):
                raise SystemExit("eager: results differ, no time is printed")
            # 100 calls: the queue of launches must not fill up, or the device is timed.
            with_out = functools.partial(ours, out=out, lse=lse)
            calls = {"raw": raw, "operator": called, "decode": ours, "with_out": with_out}
            us = host_us(calls, repeats=100, sync=True)
            results[name] = {
                "raw_us": us["raw"],
                "operator_added_us": us["operator"] - us["raw"],
                "added_us": us["decode"] - us["raw"],
                "added_with_out_us": us["with_out"] - us["raw"],
            }
    return results


def python_added() -> dict[str, float]:
    inputs, out, lse = small_call("cpu")
    metadata = inputs[4]

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def raw() -> None:
        nothing(*inputs[:4], *metadata, out, lse, softmax_scale=SCALE, causal=True, attn_sink=None)

    def ours() -> None:
        mla_ops.mla_decode(*inputs, softmax_scale=SCALE, out=out, lse=lse)

    original = _decode_plan.kernel
    _decode_plan.forget_plans()
    _decode_plan.kernel = lambda backend, op: nothing
    try:
        results = {}
        for name, mode in MODES.items():
            with mode():
                us = host_us({"raw": raw, "ours": ours}, 1000, sync=False)
                results[name] = us["ours"] - us["raw"]
        return results
    finally:
        _decode_plan.kernel = original
        _decode_plan.forget_plans()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("graph", "eager", "python"), action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs_here = torch.cuda.is_available() and not flash_mla.unavailable(torch.device("cuda"))
    parts = args.only or (("graph", "eager", "python") if runs_here else ("python",))
    record: dict[str, Any] = {**environment()}
    if "graph" in parts:
        record["graph"] = {}
        for shape in SHAPES:
            found = graph_ratio(*shape)
            record["graph"][str(shape)] = found
            print(
                f"graph b,h,k={shape} compiled {found['compiled_us']:.1f} us, by hand "
                f"{found['by_hand_us']:.1f} us, ratio {found['ratio']:.3f} (at most 1.02)"
            )
            torch.cuda.empty_cache()
    if "eager" in parts:
        record["eager"] = eager_added()
        for name, found in record["eager"].items():
            print(
                f"eager {name:14} raw {found['raw_us']:.1f} us, operator adds "
                f"{found['operator_added_us']:.1f} us, mla_decode {found['added_us']:.1f} us, "
                f"with out= and lse= {found['added_with_out_us']:.1f} us"
            )
    if "python" in parts:
        record["python_added_us"] = python_added()
        for name, added in record["python_added_us"].items():
            print(f"python {name:14} added {added:.1f} us")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
