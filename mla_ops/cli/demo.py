"""``python -m mla_ops demo``: a model decodes eagerly and captured; every claim is checked."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops.cli.model import DemoModel, demo_config, read_prompts
from mla_ops.cli.options import DTYPES, available_device, default_device, positive
from mla_ops.diagnostics import Measurement, measuring
from mla_ops.diagnostics.json_text import json_text
from mla_ops.ops._selection import backend_report
from mla_ops.presets import PRESETS

__all__ = ["configure", "demo", "run"]

# Warm-up, recording, first replay, and one more for good measure: not timed.
UNTIMED_STEPS = 4
MIN_DISTINCT_TOKENS = 16
# Of the standard deviation of the logits. Low precision: Inductor keeps float32 between fused
# operations where eager rounds; a step that reads a wrong key is off by several deviations.
LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


class Row(NamedTuple):
    """One line of the table: a fact and, where it is claimed, whether the claim holds."""

    name: str
    value: Any
    claim: str = ""
    holds: bool = True


class Decoded(NamedTuple):
    """What one way of decoding gave: [steps, B], [steps, B, 256] and tokens a second."""

    tokens: Tensor
    logits: Tensor
    tokens_per_second: float


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--device", default=default_device(), help="default: %(default)s")
    parser.add_argument(
        "--preset",
        default="small",
        choices=("small", *PRESETS),
        help="attention layer: a small one, or that of a published model",
    )
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=64, help="tokens each sequence decodes")
    parser.add_argument("--batch", type=positive, default=4, help="sequences")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 on the CPU, bf16 elsewhere")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--transformers", action="store_true", help="a Hugging Face model instead")


def run(options: argparse.Namespace) -> int:
    """Run the demo, print its table, return 1 if a claim fails."""
    try:
        device = available_device("demo", options.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.transformers:
        try:
            from mla_ops.cli.demo_transformers import demo_transformers
        except ImportError as error:
            reason = str(error).split("\n")[0]
            print(
                f"demo: transformers must be importable, got {reason} (pip install transformers)",
                file=sys.stderr,
            )
            return 2
        rows = demo_transformers(device=device, num_layers=options.layers, steps=options.steps)
        print(_as_json(rows) if options.json else _as_table(rows))
        return 0 if all(row.holds for row in rows) else 1
    default_dtype = "fp32" if device.type == "cpu" else "bf16"
    rows = demo(
        device=device,
        preset=options.preset,
        num_layers=options.layers,
        steps=options.steps,
        batch_size=options.batch,
        dtype=DTYPES[options.dtype or default_dtype],
    )
    print(_as_json(rows) if options.json else _as_table(rows))
    return 0 if all(row.holds for row in rows) else 1


@torch.no_grad()
def demo(
    *,
    device: torch.device,
    preset: str,
    num_layers: int,
    steps: int,
    batch_size: int,
    dtype: torch.dtype,
) -> list[Row]:
    """Decode ``steps`` tokens of every prompt both ways and compare.

    Returns:
        The facts and claims, in the order of the table.
    """
    config = demo_config(preset)
    prompts = read_prompts(batch_size)
    longest = max(len(prompt.encode()) for prompt in prompts)
    _say(f"building {num_layers} layers of {preset} on {device}")
    model = DemoModel(
        config,
        num_layers=num_layers,
        batch_size=batch_size,
        max_seq_len=longest + steps,
        dtype=dtype,
        device=device,
    )
    _say(f"decoding {steps} steps eagerly")
    eager = _decode(model, model, prompts, steps)
    with measuring(model.pool_bytes) as recorder:
        compiled_step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        with _ticking("compiling"):
            # Compiles on its first step; what it decodes is thrown away.
            _decode(model, compiled_step, prompts, 1)
        _say(f"decoding {steps} steps compiled")
        compiled = _decode(model, compiled_step, prompts, steps)
        seen = recorder.result()
    sizes = {"batch_size": batch_size, "max_seq_len": model.cache.max_seq_len}
    return [
        Row("device", _device_name(device)),
        Row("backend", _backend(config, device=device, dtype=dtype, **sizes)),
        Row("dtype", str(dtype).removeprefix("torch.")),
        *_compile_rows(seen),
        *_decode_rows(eager, compiled, dtype),
    ]


def _backend(config: Any, **call: Any) -> str:
    return backend_report(
        num_heads_q=config.num_attention_heads,
        head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
        head_dim_v=config.kv_lora_rank,
        **call,
    ).choice


def _compile_rows(seen: Measurement) -> list[Row]:
    launches = seen.launches or {}
    metadata = sum(
        count for name, count in launches.items() if name.startswith("mla_ops.mla_metadata")
    )
    rows = [
        _equal("graphs", seen.graphs, 1),
        _equal("graph breaks", _length(seen.breaks), 0),
        _equal("recompiles", _length(seen.recompiles), 0),
        _equal("pool clones", _length(seen.clones), 0),
        _equal("metadata launches a step", None if seen.launches is None else metadata, 1),
        Row("decode launches a step", launches.get("mla_ops.mla_decode")),
    ]
    if not seen.capturable:
        return [*rows, Row("CUDA graphs", "none on this device")]
    recorded = bool(seen.recordings)
    return [
        *rows,
        Row("CUDA graph recordings", _shown(seen.recordings), "at least 1", recorded),
        _equal("CUDA graph skips", seen.skips, 0),
        Row("CUDA graph replays", _shown(seen.replays)),
    ]


def _decode_rows(eager: Decoded, compiled: Decoded, dtype: torch.dtype) -> list[Row]:
    equal = eager.tokens == compiled.tokens
    # Once a row's tokens part, the two decode different texts.
    parted = (~equal).cumsum(0)
    comparable = torch.cat((torch.zeros_like(parted[:1]), parted[:-1])) == 0
    difference = (eager.logits - compiled.logits).abs().amax(-1)[comparable].max().item()
    tolerance = LOGIT_TOLERANCE[dtype] * eager.logits.std().item()
    distinct = int(eager.tokens.unique().numel())
    same = bool(equal.all())
    is_fp32 = dtype == torch.float32
    return [
        Row("tokens/s eager", round(eager.tokens_per_second, 1)),
        Row("tokens/s compiled", round(compiled.tokens_per_second, 1)),
        Row(
            "max logit difference",
            float(f"{difference:.3g}"),
            f"at most {tolerance:.2g}",
            difference <= tolerance,
        ),
        Row(
            *("tokens equal", f"{int(equal.sum())} of {equal.numel()}"),
            *(("all", same) if is_fp32 else ("", True)),
        ),
        Row(
            *("distinct tokens", distinct, f"at least {MIN_DISTINCT_TOKENS}"),
            distinct >= MIN_DISTINCT_TOKENS,
        ),
    ]


def _decode(
    model: DemoModel, step: Callable[[], tuple[Tensor, Tensor]], prompts: list[str], steps: int
) -> Decoded:
    """Prefill the prompts anew and decode with ``step``; the first steps are not timed."""
    model.prefill(prompts)
    tokens, logits = [], []
    untimed = min(UNTIMED_STEPS, steps - 1)
    begin = time.perf_counter()
    for index in range(steps):
        if index == untimed:
            _synchronize(model.tokens)
            begin = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        token, logit = step()
        # Copied: the next replay overwrites them.
        tokens.append(token.clone())
        logits.append(logit.clone())
    _synchronize(model.tokens)
    seconds = time.perf_counter() - begin
    rate = (steps - untimed) * model.batch_size / seconds
    return Decoded(torch.stack(tokens).cpu(), torch.stack(logits).float().cpu(), rate)


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _equal(name: str, value: int | None, expected: int) -> Row:
    return Row(name, _shown(value), str(expected), value == expected)


def _length(items: tuple[Any, ...] | None) -> int | None:
    return None if items is None else len(items)


def _shown(value: int | None) -> int | str:
    return "unknown" if value is None else value


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _as_table(rows: list[Row]) -> str:
    width = max(len(row.name) for row in rows)
    values = max(len(str(row.value)) for row in rows)
    lines = []
    for row in rows:
        verdict = "" if not row.claim else ("ok      " if row.holds else "FAILED  ") + row.claim
        lines.append(f"{row.name:{width}}  {row.value!s:{values}}  {verdict}".rstrip())
    return "\n".join(lines)


def _as_json(rows: list[Row]) -> str:
    facts = {row.name: row.value for row in rows}
    failed = [row.name for row in rows if not row.holds]
    return json_text({"facts": facts, "failed": failed})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ticking(text: str, seconds: float = 5.0) -> Iterator[None]:
    """Say that it still works every few seconds."""
    done = threading.Event()
    begin = time.perf_counter()

    def tick() -> None:
        while not done.wait(seconds):
            _say(f"{text}: {time.perf_counter() - begin:.0f} s")

    _say(text)
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
