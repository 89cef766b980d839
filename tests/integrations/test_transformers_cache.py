"""MLAStaticCache: reused memory, beams, crops, chunks, several tokens a step, refusals."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.16")

import transformers
from tiny_models import cache_name, known, prompts, tiny_model

from mla_ops import CacheCapacityError
from mla_ops.integrations.transformers import MLAStaticCache, patch, patched, unpatch
from mla_ops.integrations.transformers_hooks import mask
from mla_ops.integrations.transformers_pool import PAGED

LOGITS = 1e-5


@pytest.fixture
def model():
    return tiny_model("deepseek_v3")


def generate(model, ids, mask, **kwargs):
    settings = {"max_new_tokens": 10, "do_sample": False, "cache_implementation": "static"}
    return model.generate(ids, attention_mask=mask, **settings | kwargs)


def step(model, cache, ids, mask=None, **kwargs):
    return model(
        input_ids=ids, attention_mask=mask, use_cache=True, **{cache_name(model): cache}, **kwargs
    ).logits


def addresses(model):
    layers = model._prepare_static_cache.cache.layers
    return [layer.kv_cache.data_ptr() for layer in layers if hasattr(layer, "kv_cache")]


def test_memory_is_reused_and_forgotten(model):
    """Prompt A, then prompt B on the same memory: B's tokens are those of a fresh model."""
    a, b = prompts(seed=1), prompts(seed=2)
    expected = generate(model, *b)
    patch(model)
    generate(model, *a)
    before = addresses(model)
    assert torch.equal(generate(model, *b), expected)
    assert addresses(model) == before
    for layer in model._prepare_static_cache.cache.layers:
        layer.kv_cache.fill_(float("nan"))
    assert torch.equal(generate(model, *b), expected)


def test_smaller_batches_and_shorter_prompts_use_the_same_memory(model):
    wide, small = prompts(batch=4, length=30), prompts(batch=2, length=11)
    expected = generate(model, *small)
    patch(model)
    generate(model, *wide)
    before = addresses(model)
    assert torch.equal(generate(model, *small), expected)
    assert addresses(model) == before


def test_larger_batches_and_longer_prompts_get_new_memory(model):
    wide, small = prompts(batch=4, length=70), prompts(batch=2, length=11)
    expected = [generate(model, *x) for x in (small, wide, small)]
    patch(model)
    for batch, tokens in zip((small, wide, small), expected, strict=True):
        assert torch.equal(generate(model, *batch), tokens)
    assert model._prepare_static_cache.cache.fits(4, 79)


def test_a_returned_cache_continues_until_the_next_call(model):
    """Symptom without retirement: the old cache answers with the next call's tokens."""
    ids, mask = prompts()
    patch(model)
    first = generate(model, ids, mask, return_dict_in_generate=True)
    held = first[cache_name(model)]
    assert held.get_seq_length() == ids.shape[1] + 9
    generate(model, ids, mask)
    with pytest.raises(RuntimeError, match="memory a later call reused"):
        step(model, held, ids[:, :1])


def test_a_cache_of_ones_own_outlives_generate(model):
    ids, mask = prompts(batch=2)
    mask[:] = 1
    expected = step(model, transformers.StaticCache(model.config, 40), ids[:, :12])
    patch(model)
    cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=40)
    assert (step(model, cache, ids[:, :12]) - expected).abs().max() <= LOGITS
    generate(model, *prompts(seed=3))
    unpatch(model)
    static = transformers.StaticCache(model.config, 40)
    step(model, static, ids[:, :12])
    expected = step(model, static, ids[:, 12:13])
    patch(model)
    assert (step(model, cache, ids[:, 12:13]) - expected).abs().max() <= LOGITS


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32"])
def test_beam_search_reorders_in_place(model_type):
    model = tiny_model(model_type)
    ids, mask = prompts()
    expected = generate(model, ids, mask, num_beams=3)
    report = patch(model)
    if not report.layers:
        pytest.skip(report.skipped[0].reason)
    assert torch.equal(generate(model, ids, mask, num_beams=3), expected)
    before = addresses(model)
    assert torch.equal(generate(model, ids, mask, num_beams=3), expected)
    assert addresses(model) == before


def test_sampled_sequences_share_a_prompt(model):
    ids, mask = prompts()

    def sample():
        torch.manual_seed(5)
        return generate(model, ids, mask, do_sample=True, num_return_sequences=2)

    expected = sample()
    patch(model)
    assert torch.equal(sample(), expected)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "hy_v4"])
@pytest.mark.parametrize("tokens", [2, 8, 12])
def test_several_tokens_a_step(model_type, tokens):
    """Up to 8 tokens decode, causal among themselves; more are expanded from the pool."""
    if not known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(model_type)
    ids, mask = prompts(length=40)

    def run(make):
        cache = make()
        step(model, cache, ids[:, :15], mask[:, :15])
        return [
            step(model, cache, ids[:, start : start + tokens], mask[:, : start + tokens])
            for start in range(15, 40 - tokens, tokens)
        ]

    real = mask[:, 15:].bool()
    expected = run(lambda: transformers.StaticCache(model.config, 64))
    if not patch(model).layers:
        pytest.skip("this release caches expanded keys")
    found = run(lambda: MLAStaticCache(model, max_batch_size=3, max_cache_len=64))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        shown = real[:, number * tokens :][:, :tokens]
        assert (ours - theirs)[shown].abs().max() <= LOGITS


def test_crop_forgets_the_last_tokens(model):
    ids, mask = prompts(length=24)
    patch(model)
    cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=64)
    step(model, cache, ids[:, :20], mask[:, :20])
    expected = step(model, cache, ids[:, 20:22], mask[:, :22])
    longer = torch.cat([mask[:, :22], torch.ones_like(mask[:, :2])], dim=1)
    step(model, cache, ids[:, :2], longer)
    cache.crop(-4)
    assert cache.get_seq_length() == 20
    assert torch.equal(step(model, cache, ids[:, 20:22], mask[:, :22]), expected)
    with pytest.raises(ValueError, match="tokens_to_remove must be <= 0"):
        cache.crop(3)


def test_assisted_generation(model):
    """Speculative decoding: several tokens a step and crops between the steps."""
    ids, _ = prompts(batch=1)
    expected = generate(model, ids, torch.ones_like(ids), cache_implementation=None)
    patch(model)
    assistant = tiny_model("deepseek_v3", seed=1)
    cache = MLAStaticCache(model, max_batch_size=1, max_cache_len=64)
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        assistant_model=assistant,
        **{cache_name(model): cache},
    )
    assert torch.equal(tokens, expected)


def test_chunked_prefill(model):
    ids, _ = prompts(length=40)
    whole = torch.ones_like(ids)
    expected = generate(model, ids, whole)
    patch(model)
    assert torch.equal(generate(model, ids, whole, prefill_chunk_size=16), expected)
    # Chunks read the pool past the tokens seen: what an earlier call left there must not count.
    for layer in model._prepare_static_cache.cache.layers:
        layer.kv_cache.fill_(float("nan"))
    assert torch.equal(generate(model, ids, whole, prefill_chunk_size=16), expected)
    assert torch.equal(generate(model, ids, whole, prefill_chunk_size=5), expected)


def test_chunked_prefill_of_padded_prompts_is_refused(model):
    ids, padded = prompts(length=40)
    patch(model)
    with pytest.raises(ValueError, match="prefill_chunk_size must be None for a padded batch"):
        generate(model, ids, padded, prefill_chunk_size=16)


def test_offloading_is_refused(model):
    patch(model)
    with pytest.raises(ValueError, match='must be "static", got'):
        generate(model, *prompts(), cache_implementation="offloaded_static")


@pytest.mark.parametrize("length", [6, 20])
def test_padding_on_the_right_is_refused(model, length):
    """Symptom without the check: the first new token overwrites a prompt token."""
    ids, mask = prompts(length=length)
    patch(model)
    with pytest.raises(ValueError, match="zeros followed by ones"):
        generate(model, ids, mask.flip(1))


def test_a_mask_of_the_new_tokens_only_is_refused(model):
    ids, mask = prompts()
    patch(model)
    cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=64)
    step(model, cache, ids, mask)
    with pytest.raises(ValueError, match="must cover all 24 tokens"):
        step(model, cache, ids[:, :4], mask[:, -4:])


def test_custom_masks_are_refused(model):
    ids, _ = prompts()
    patch(model)
    cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=64)
    for custom in (torch.ones(3, 1, 20, 64, dtype=torch.bool), torch.zeros(3, 1, 20, 64)):
        with pytest.raises(ValueError, match="must be the 2-D mask"):
            step(model, cache, ids, custom)
    with pytest.raises(ValueError, match="custom mask function"):
        mask(3, 1, 64, 20, PAGED, mask_function=lambda *args: True)


def test_capacity_is_checked(model):
    ids, padded = prompts()
    patch(model)
    cache = MLAStaticCache(model, max_batch_size=2, max_cache_len=64)
    with pytest.raises(CacheCapacityError, match="at most max_batch_size = 2, got 3"):
        step(model, cache, ids, padded)
    cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=16)
    with pytest.raises(CacheCapacityError, match="at most max_cache_len = 16 tokens, got 20"):
        step(model, cache, ids, padded)
    with pytest.raises(RuntimeError, match="max_cache_len is exceeded"):
        step(model, cache, ids)


def test_rows_never_touch_each_other(model):
    """The neighbours of a row keep their bytes, and so do slots past its length."""
    ids, _ = prompts(batch=2)
    patch(model)
    cache = MLAStaticCache(model, max_batch_size=3, max_cache_len=64)
    pool = cache.layers[0].rows(3)
    pool.fill_(7.0)
    step(model, cache, ids, torch.ones_like(ids))
    assert bool((pool[2] == 7.0).all())
    assert bool((pool[:2, 20:] == 7.0).all())
    assert not bool((pool[:2, :20] == 7.0).any(-1).all())


def test_a_model_that_is_not_served_gets_no_cache():
    model = tiny_model("deepseek_v3", kv_lora_rank=96)
    with pytest.raises(ValueError, match="must be one that patch serves"):
        MLAStaticCache(model, max_batch_size=1, max_cache_len=64)


def test_building_a_cache_inside_a_compiled_region_is_refused(model):
    patch(model)

    def build(x):
        MLAStaticCache(model, max_batch_size=1, max_cache_len=64)
        return x + 1

    with pytest.raises(Exception, match="cache must be built between steps"):
        torch.compile(build, backend="eager", fullgraph=True)(torch.ones(1))


def test_hybrid_models_keep_their_linear_layers():
    if not known("kimi_linear"):
        pytest.skip("this transformers has no kimi_linear")
    model = tiny_model("kimi_linear")
    batches = [prompts(batch=3), prompts(batch=2), prompts(batch=3, seed=9)]
    expected = [generate(model, *batch) for batch in batches]
    with patched(model):
        for batch, tokens in zip(batches, expected, strict=True):
            assert torch.equal(generate(model, *batch), tokens)
