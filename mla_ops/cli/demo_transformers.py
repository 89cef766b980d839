"""``python -m mla_ops demo --transformers``: a random transformers model, patched and compared."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor

from mla_ops.cli.demo import Row
from mla_ops.diagnostics import Measurement, measuring
from mla_ops.integrations.transformers import patch, unpatch, verify

__all__ = ["demo_transformers"]

BATCH_SIZE = 3
PROMPT_TOKENS = 1000
# Promised in float32; logits of the demo's model have a standard deviation near 1.
LOGIT_TOLERANCE = 1e-4


@torch.no_grad()
def demo_transformers(*, device: torch.device, num_layers: int, steps: int) -> list[Row]:
    """Generate from left-padded prompts with and without the patch, then compiled.

    Args:
        device: where the model runs.
        num_layers: layers of DeepSeek-V3, small.
        steps: tokens to generate.

    Returns:
        The facts and claims, in the order of the table.
    """
    model = _model(num_layers, device)
    ids, mask = _prompts(device)
    found = verify(model, ids, attention_mask=mask, max_new_tokens=steps)
    # The first two calls compile and record; only the third is timed.
    for _ in range(3):
        expected, plain_rate = _generate(model, ids, mask, steps)
    report = patch(model)
    pool_bytes = BATCH_SIZE * (PROMPT_TOKENS + steps - 1) * 4 * (128 + 32)
    with measuring(pool_bytes) as recorder:
        for _ in range(3):
            tokens, rate = _generate(model, ids, mask, steps)
        seen = recorder.result()
    unpatch(model)
    difference = found.max_logit_difference
    return [
        Row("transformers", transformers.__version__),
        Row("backend", report.backend),
        Row("layers that decode absorbed", len(report.layers), str(num_layers)),
        Row("cache bytes a token", report.bytes_per_token),
        Row("tokens equal", found.tokens_equal, "True", found.tokens_equal),
        Row(
            *("max logit difference", float(f"{difference:.3g}"), f"at most {LOGIT_TOLERANCE:g}"),
            difference <= LOGIT_TOLERANCE,
        ),
        *_compiled_rows(seen, torch.equal(tokens, expected)),
        Row("tokens/s unpatched", round(plain_rate, 1)),
        Row("tokens/s patched", round(rate, 1)),
    ]


def _compiled_rows(seen: Measurement, equal: bool) -> list[Row]:
    facts = {
        "graphs over 3 generate calls": (seen.graphs, 1),
        "graph breaks": (None if seen.breaks is None else len(seen.breaks), 0),
        "recompiles": (None if seen.recompiles is None else len(seen.recompiles), 0),
        "pool clones": (None if seen.clones is None else len(seen.clones), 0),
    }
    if seen.capturable:
        facts |= {
            "CUDA graph recordings": (seen.recordings, 1),
            "CUDA graph skips": (seen.skips, 0),
        }
    return [
        Row("tokens equal, compiled", equal, "True", equal),
        *(
            Row(name, "unknown" if value is None else value, str(wanted), value == wanted)
            for name, (value, wanted) in facts.items()
        ),
    ]


def _model(num_layers: int, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=64,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.06,
        pad_token_id=0,
        eos_token_id=None,
    )
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config).to(device).eval()


def _prompts(device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 256, (BATCH_SIZE, PROMPT_TOKENS))
    mask = torch.ones_like(ids)
    for row in range(BATCH_SIZE):
        mask[row, : 250 * row] = 0
    return ids.to(device), mask.to(device)


def _generate(model: Any, ids: Tensor, mask: Tensor, steps: int) -> tuple[Tensor, float]:
    """Return the sequences and the tokens a second, prefill included."""
    config: Any = transformers.CompileConfig(mode="reduce-overhead", fullgraph=True)
    # transformers compiles on GPUs only, unless told so.
    config._compile_all_devices = True
    begin = time.perf_counter()
    tokens: Tensor = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=False,
        cache_implementation="static",
        compile_config=config,
    )
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return tokens, tokens.shape[0] * steps / (time.perf_counter() - begin)
