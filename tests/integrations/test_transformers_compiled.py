"""Compiled by transformers itself: one decode graph for all generate calls, no pool copied."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.16")

import transformers
from tiny_models import DENSE, HYBRID, SPARSE, cache_name, known, prompts, tiny_model

from mla_ops.diagnostics.measure import measuring
from mla_ops.integrations.transformers import MLAStaticCache, patch, unpatch


def compile_config(**settings):
    config = transformers.CompileConfig(fullgraph=True, **settings)
    # transformers compiles on GPUs only, unless told so.
    config._compile_all_devices = True
    return config


def generate(model, ids, mask, **kwargs):
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    return model.generate(ids, attention_mask=mask, **settings | kwargs)


def check_three_calls(model, config):
    """Generate from A, B and A; return the measurement of the decode graph and the MLA layers."""
    batches = [tuple(x.to(model.device) for x in prompts(seed=seed)) for seed in (1, 2, 1)]
    expected = [generate(model, *batch) for batch in batches]
    layers = patch(model).layers
    if not layers:
        pytest.skip("this release caches expanded keys")
    addresses = set()
    with measuring(big_bytes=3 * 64 * 160 * model.dtype.itemsize) as recorder:
        for batch, wanted in zip(batches, expected, strict=True):
            tokens = generate(model, *batch, compile_config=config)
            # In 16 bits tokens may differ.
            assert model.dtype != torch.float32 or torch.equal(tokens, wanted)
            cache = model._prepare_static_cache.cache
            addresses.add(cache.layers[layers[0].layer_idx].kv_cache.data_ptr())
        measured = recorder.result()
    assert len(addresses) == 1
    assert measured.graphs == 1
    assert not measured.breaks
    assert measured.recompiles == ()
    return measured, len(layers)


@pytest.mark.parametrize("model_type", [*DENSE, *SPARSE, *HYBRID])
def test_one_graph_for_all_calls(model_type):
    if not known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(model_type)
    if not model._can_compile_fullgraph:
        pytest.skip("its experts are a loop over data: transformers does not compile it whole")
    check_three_calls(model, compile_config(backend="aot_eager", mode=None))


def inductor(model_type, dtype=torch.float32):
    model = tiny_model(model_type, dtype=dtype, **DENSE_ONLY)
    measured, layers = check_three_calls(model, compile_config(mode="reduce-overhead"))
    assert measured.clones == ()
    assert measured.launches["mla_ops.append_kv_"] == layers
    # Fresh outputs of the decode, or buffers of the graph's own: one launch a layer either way.
    decodes = [n for name, n in measured.launches.items() if "mla_decode" in name]
    assert sum(decodes) == layers
    return measured


# Mixtures of experts take a minute to compile and change nothing in the attention.
DENSE_ONLY = {"first_k_dense_replace": 9}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_copies_no_pool(dtype):
    measured = inductor("deepseek_v3", dtype)
    # No backend that serves these models reads a schedule.
    assert not any("mla_metadata" in name for name in measured.launches)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["minicpm3", "deepseek_v32", "hy_v4"])
def test_inductor_on_more_architectures(model_type):
    inductor(model_type)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((name, torch.float32) for name in ("deepseek_v3", "minicpm3", "deepseek_v32")),
        *((name, torch.bfloat16) for name in ("deepseek_v3", "deepseek_v32")),
    ],
)
def test_cuda_graphs_are_recorded_once(model_type, dtype):
    model = tiny_model(model_type, dtype=dtype, **DENSE_ONLY).cuda()
    report = patch(model)
    if not report.layers:
        # 5.17 caches the expanded keys of deepseek_v32: refused whole, with the reason.
        assert "caches expanded keys" in report.skipped[0].reason
        return
    unpatch(model)
    measured, _ = check_three_calls(model, compile_config(mode="reduce-overhead"))
    assert measured.skips == 0, measured.reasons
    assert measured.recordings == 1
    assert measured.replays is None or measured.replays >= 15
    assert measured.clones == ()


def test_two_batch_sizes_decode_from_one_memory():
    model = tiny_model("deepseek_v3")
    wide, small = prompts(batch=4), prompts(batch=2)
    expected = [generate(model, *batch) for batch in (wide, small)]
    patch(model)
    config = compile_config(backend="aot_eager", mode=None)
    for batch, tokens in zip((wide, small), expected, strict=True):
        assert torch.equal(generate(model, *batch, compile_config=config), tokens)


def test_several_tokens_a_step_compiled():
    model = tiny_model("youtu")
    ids, mask = prompts(length=24)
    patch(model)
    name = cache_name(model)
    logits = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=64)
        model(input_ids=ids[:, :20], attention_mask=mask[:, :20], **{name: cache})
        for at in (20, 22):
            new, seen = ids[:, at : at + 2], mask[:, : at + 2]
            logits.append(forward(input_ids=new, attention_mask=seen, **{name: cache}).logits)
    logits = [logits[:2], logits[2:]]
    for eager, compiled in zip(*logits, strict=True):
        assert (eager - compiled).abs().max() <= 1e-5
