"""Decode time of a transformers model with DeepSeek-V3 layers, with and without the patch.

Both variants run in bf16 from a static cache and are compiled by transformers itself. Time per
token and layer is the slope between two depths, so that embedding, head and the generation loop
cancel. Before anything is timed, the errors of both against float32 are printed.

    python scripts/bench_transformers.py --json results.json            # all shapes
    python scripts/bench_transformers.py --shapes 8x4096                # one shape a run
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from _record import environment
from transformers import AutoModelForCausalLM, StaticCache

from mla_ops.diagnostics.measure import measuring
from mla_ops.integrations.transformers import MLAStaticCache, patch, unpatch

# (us a layer of the unpatched model on an H200 with transformers 5.17, must, aim)
GOALS = {(1, 4096): (1083, 2.0, 2.3), (8, 4096): (3749, 6.5, 7.5), (1, 32768): (3903, 7.0, 8.5)}
TIMED_STEPS = 24
# Tokens that the cache holds beyond the prompt.
ROOM = 32
ROUNDS = 3
# Models whose errors are averaged: one alone is a few percent off either way.
SEEDS = range(4)


def layers_of_deepseek_v3(depth, device, vocab_size, tiny=False, seed=0):
    """Build DeepSeek-V3 layers with a dense MLP of 4 x hidden and random weights."""
    sizes = {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536}
    if tiny:
        sizes = {"hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 64}
    config = transformers.DeepseekV3Config(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        intermediate_size=4 * sizes["hidden_size"],
        num_hidden_layers=depth,
        first_k_dense_replace=depth,
        vocab_size=vocab_size,
        max_position_embeddings=163840,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).eval()


def cache_argument(model):
    """Name the argument of forward that takes the cache: it changed with transformers 5.24."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def new_cache(model, batch, length, patched):
    if patched:
        return MLAStaticCache(model, max_batch_size=batch, max_cache_len=length)
    return StaticCache(config=model.config, max_cache_len=length)


def prefill(model, ids, cache):
    return model(
        input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache}
    ).logits


class Decoder:
    """Steps as ``generate`` makes them: inputs prepared by the model, its own compiled call."""

    def __init__(self, model, ids, length, patched):
        self.model = model
        self.cache = new_cache(model, ids.shape[0], length, patched)
        self.past = ids.shape[1]
        self.token = prefill(model, ids, self.cache)[:, -1:].argmax(-1)
        self.mask = torch.ones((ids.shape[0], length), dtype=torch.long, device=ids.device)
        self.forward = model.get_compiled_call(None)

    def step(self):
        self.past += 1
        inputs = self.model.prepare_inputs_for_generation(
            self.token,
            next_sequence_length=1,
            attention_mask=self.mask[:, : self.past],
            use_cache=True,
            **{cache_argument(self.model): self.cache},
        )
        logits = self.forward(**inputs, return_dict=True).logits
        self.token = logits[:, -1:].argmax(-1)

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def rewind(self, tokens):
        """Forget the last tokens, in place, whatever the class of the cache."""
        lengths = [layer.cumulative_length for layer in self.cache.layers]
        for length in {length.data_ptr(): length for length in lengths}.values():
            length.sub_(tokens)
        self.past -= tokens


def forget_compiled(model):
    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)


def milliseconds(call):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def step_us(model, batch, length, patched, room=ROOM):
    """Return (us a step, peak GiB beside the weights while decoding) from ``length`` tokens on."""
    forget_compiled(model)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    decoder = Decoder(model, ids, length + room, patched)
    torch.cuda.empty_cache()
    # What a captured step needs is allocated while it is recorded, in these first steps.
    torch.cuda.reset_peak_memory_stats()
    decoder.run(4)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    decoder.rewind(4)
    times = []
    for _ in range(ROUNDS):
        elapsed = milliseconds(partial(decoder.run, TIMED_STEPS))
        times.append(elapsed * 1e3 / TIMED_STEPS)
        decoder.rewind(TIMED_STEPS)
    del decoder
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(times), peak


def errors(device, tiny=False, length=512, steps=8, seed=0):
    """Return the relative RMS errors (unpatched, patched) of bf16 logits against float32."""
    model = layers_of_deepseek_v3(2, device, 1024, tiny, seed)
    exact = copy.deepcopy(model).float()
    ids = torch.randint(1, 1024, (2, length + steps), device=device)
    reference = teacher_forced(exact, ids, length, patched=False)
    del exact
    plain = teacher_forced(model, ids, length, patched=False)
    patch(model)
    absorbed = teacher_forced(model, ids, length, patched=True)
    return [float((x - reference).norm() / reference.norm()) for x in (plain, absorbed)]


def teacher_forced(model, ids, length, patched):
    """Decode given tokens one by one, eagerly; return their float32 logits."""
    cache = new_cache(model, ids.shape[0], ids.shape[1], patched)
    prefill(model, ids[:, :length], cache)
    logits = []
    for position in range(length, ids.shape[1]):
        mask = torch.ones_like(ids[:, : position + 1])
        logits.append(
            model(
                input_ids=ids[:, position : position + 1],
                attention_mask=mask,
                use_cache=True,
                **{cache_argument(model): cache},
            ).logits.float()
        )
    return torch.cat(logits, dim=1)


def captures(device, tiny=False):
    """Run ``generate`` three times on the patched model and count what was recorded."""
    model = layers_of_deepseek_v3(2, device, 1024, tiny)
    patch(model)
    ids = torch.randint(1, 1024, (2, 300), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    with measuring() as recorder:
        for _ in range(3):
            model.generate(ids, max_new_tokens=16, cache_implementation="static", **options)
        seen = recorder.result()
    counts = {
        "graphs": seen.graphs,
        "recompiles": None if seen.recompiles is None else len(seen.recompiles),
        "recordings": seen.recordings,
        "replays": seen.replays,
        "skips": seen.skips,
        "reasons": list(seen.reasons),
        "clones": None if seen.clones is None else len(seen.clones),
        "launches": None if seen.launches is None else dict(seen.launches),
    }
    unpatch(model)
    return counts


def tokens_per_s(model, batch, length):
    """Return whole tokens a second of ``generate`` after one call that compiles."""
    forget_compiled(model)
    steps = 48
    ids = torch.randint(1, model.config.vocab_size, (batch, length - steps), device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    options |= {"cache_implementation": "static", "max_cache_len": length}
    # The difference of two lengths leaves prefill out.
    seconds = {
        new: milliseconds(lambda new=new: model.generate(ids, max_new_tokens=new, **options)) / 1e3
        for new in (steps, 16, steps)
    }
    return batch * (steps - 16) / max(seconds[steps] - seconds[16], 1e-9)


def measure_shape(models, batch, length, report):
    few, many = sorted(models)
    row = {"batch": batch, "cached_tokens": length}
    for name in ("unpatched", "patched"):
        us = {}
        for depth, model in models.items():
            if name == "patched":
                patch(model)
            us[depth], peak = step_us(model, batch, length, name == "patched")
        row[name] = {
            "us_per_layer": (us[many] - us[few]) / (many - few),
            "us_per_step": {str(depth): value for depth, value in us.items()},
            "peak_gib": peak,
        }
        if report["tokens_per_s"]:
            row[name]["tokens_per_s"] = tokens_per_s(models[many], batch, length)
        for model in models.values():
            unpatch(model)
    row["speedup"] = row["unpatched"]["us_per_layer"] / row["patched"]["us_per_layer"]
    return row


def print_row(row):
    batch, length = row["batch"], row["cached_tokens"]
    known, must, aim = GOALS.get((batch, length), (float("nan"), float("nan"), float("nan")))
    plain, ours = row["unpatched"], row["patched"]
    print(
        f"b={batch:<3} T={length:<6} us/layer {plain['us_per_layer']:8.0f} -> "
        f"{ours['us_per_layer']:7.0f}  x{row['speedup']:5.2f} (must {must}, aim {aim}, "
        f"unpatched elsewhere {known})  tokens/s {plain.get('tokens_per_s', 0):7.1f} -> "
        f"{ours.get('tokens_per_s', 0):7.1f}  peak GiB {plain['peak_gib']:6.2f} -> "
        f"{ours['peak_gib']:6.2f}  us/step {plain['us_per_step']} -> {ours['us_per_step']}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["1x4096", "8x4096", "1x32768"])
    parser.add_argument("--layers", nargs=2, type=int, default=[2, 6])
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--no-tokens-per-s", action="store_true", help="slopes only, quicker")
    parser.add_argument("--no-checks", action="store_true", help="skip errors and captures")
    parser.add_argument("--check-only", action="store_true", help="errors only, tiny on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = environment() | {"transformers": transformers.__version__, "rows": []}
    report["tokens_per_s"] = not args.no_tokens_per_s
    if not args.no_checks:
        pairs = [errors(device, device == "cpu", seed=seed) for seed in SEEDS]
        plain, ours = map(statistics.mean, zip(*pairs, strict=True))
        report["errors"] = {"unpatched": plain, "patched": ours, "pairs": pairs}
        print(f"relative RMS error against float32: unpatched {plain:.2e}, patched {ours:.2e}")
        if ours > plain:
            sys.exit("the patched model is less exact than the unpatched one: nothing is timed")
    if args.check_only or device == "cpu":
        return
    if not args.no_checks:
        report["captures"] = captures(device)
        print("patched, 3 generate calls:", report["captures"], flush=True)
    models = {d: layers_of_deepseek_v3(d, device, args.vocab_size) for d in args.layers}
    for shape in args.shapes:
        batch, length = map(int, shape.split("x"))
        row = measure_shape(models, batch, length, report)
        report["rows"].append(row)
        print_row(row)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
