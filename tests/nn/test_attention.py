"""MLAAttention: absorbed decode, expanded prefill and transformers' layer are one function."""

import copy

import pytest
import torch
from layers import (
    SIZES,
    TOKENS,
    VARIANTS,
    YARN,
    assert_same,
    continued,
    decode,
    hidden,
    make_cache,
    make_layer,
    prefill,
)
from torch import nn

from mla_ops.nn import MLAAttention, MLAConfig
from mla_ops.nn.config import MODEL_TYPES

MODELS = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "minicpm3": "MiniCPM3",
    "youtu": "Youtu",
}


def transformers_layer(dtype, *, exact_norms, model_type="deepseek_v3", **change):
    """Return an attention layer with random weights, as a function of hidden states."""
    transformers, name = pytest.importorskip("transformers"), MODELS[model_type]
    module = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    sizes = dict(SIZES | change)
    scaling = sizes.pop("rope_scaling", None) or {"rope_type": "default"}
    config = getattr(transformers, f"{name}Config")(
        **sizes,
        num_key_value_heads=4,
        rms_norm_eps=1e-2,
        rope_parameters=scaling | {"rope_theta": 5000.0},
    )
    config._attn_implementation = "sdpa"
    theirs = getattr(module, f"{name}Attention")(config, 0).to(dtype)
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    state = copy.deepcopy(theirs.state_dict())
    if exact_norms:
        # Theirs round float64 to float32; the rest of the layer does not.
        for norm_name in ("q_a_layernorm", "kv_a_layernorm"):
            if getattr(theirs, norm_name) is not None:
                norm = nn.RMSNorm(len(state[f"{norm_name}.weight"]), eps=1e-6, dtype=dtype)
                norm.weight.copy_(state[f"{norm_name}.weight"])
                setattr(theirs, norm_name, norm)
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)

    def run(x):
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        return theirs(x, position_embeddings=rotary(x, positions), attention_mask=None)[0]

    return config, state, run


@pytest.mark.parametrize("model_type", MODELS)
def test_served_model_types_have_this_attention(model_type):
    """Symptom: a model type of the list differs (RoPE layout, epsilon) and decodes garbage."""
    config, state, run = transformers_layer(
        torch.float32, exact_norms=False, model_type=model_type, rope_scaling=YARN
    )
    assert config.model_type in MODEL_TYPES
    layer = MLAAttention(MLAConfig.from_transformers(config))
    layer.load_state_dict(state, strict=True)
    x, cache = hidden(torch.float32), make_cache(dtype=torch.float32)
    expected = run(x)
    assert_same(prefill(layer, cache, x[:, :19]), expected[:, :19], atol=3e-5)
    assert_same(decode(layer, cache, x[:, 19:]), expected[:, 19:], atol=3e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 3e-5)], ids=["fp64", "fp32"]
)
def test_equals_transformers_in_prefill_and_decode(variant, dtype, atol):
    exact = dtype == torch.float64
    config, state, run = transformers_layer(dtype, exact_norms=exact, **VARIANTS[variant])
    layer = MLAAttention(MLAConfig.from_transformers(config), dtype=dtype)
    layer.load_state_dict(state, strict=True)
    x = hidden(dtype)
    expected = run(x)
    assert expected.abs().mean() > 0.1
    cache = make_cache(dtype=dtype)
    assert_same(prefill(layer, cache, x[:, :20]), expected[:, :20], atol)
    for at in range(20, TOKENS):
        assert_same(decode(layer, cache, x[:, at : at + 1]), expected[:, at : at + 1], atol)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 8])
def test_absorbed_decode_equals_the_end_of_expanded_prefill(variant, seqlen_q):
    layer, x = make_layer(**VARIANTS[variant]), hidden()
    expected = prefill(layer, make_cache(), x)
    cache = make_cache()
    prefill(layer, cache, x[:, :-seqlen_q])
    assert_same(decode(layer, cache, x[:, -seqlen_q:]), expected[:, -seqlen_q:])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunks", [(1, 22), (15, 1, 7), (16, 7), (17, 6), (4, 9, 10)], ids=str)
def test_chunked_prefill_equals_whole_prefill(chunks, page_size):
    layer, x = make_layer(), hidden()
    expected = prefill(layer, make_cache(), x)
    cache, parts = make_cache(page_size=page_size), []
    for chunk in x.split(chunks, dim=1):
        parts.append(prefill(layer, cache, chunk, start=sum(p.shape[1] for p in parts)))
    assert_same(torch.cat(parts, dim=1), expected)
    assert_same(decode(layer, cache, x[:, :1]), decode(layer, continued(layer, x), x[:, :1]))


def test_rows_of_different_lengths_share_a_batch():
    """Padded prompts, a chunk whose rows have different pasts, then decode; NaN in the padding."""
    layer, x = make_layer(), hidden()
    lengths, chunk = torch.tensor([5, 17], dtype=torch.int32), 5
    cache = make_cache()
    slots = make_slots(cache, torch.zeros(2, dtype=torch.int32), lengths, 17)
    padded = x[:, :17].masked_fill(torch.arange(17)[:, None] >= lengths[:, None, None], torch.nan)
    positions = torch.arange(17).expand(2, -1)
    first = layer.prefill(padded, positions, cache, 0, slots)
    cache.cache_seqlens.copy_(lengths)
    tail = torch.stack([x[row, n : n + chunk] for row, n in enumerate(lengths.tolist())])
    second = prefill(layer, cache, tail, start=33)  # a page past every row's table
    last = torch.stack([x[row, n + chunk] for row, n in enumerate(lengths.tolist())])
    third = decode(layer, cache, last.unsqueeze(1))
    for row, n in enumerate(lengths.tolist()):
        alone = prefill(layer, make_cache(rows=1), x[row : row + 1, : n + chunk + 1])[0]
        got = torch.cat((first[row, :n], second[row], third[row]))
        assert_same(got, alone)


def make_slots(cache, start, lengths, tokens):
    """Slots of a right-padded prompt, computed apart from the cache's own formula."""
    slots = []
    for row, (begin, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        for token in range(begin, begin + tokens):
            page = int(cache.block_table[row, token // cache.page_size])
            slot = page * cache.page_size + token % cache.page_size
            slots.append(slot if token < begin + length else -1)
    return torch.tensor(slots)


def test_a_page_outside_the_pool_counts_as_no_keys_in_a_chunk_as_in_decode():
    layer, x, outs = make_layer(), hidden(), []
    for step in (lambda *a: prefill(*a, start=19), decode):
        cache = make_cache()
        prefill(layer, cache, x[:, :19])
        cache.block_table[0, 0], cache.block_table[1, 0] = -1, cache.num_pages
        outs.append(step(layer, cache, x[:, 19:]))
    assert_same(*outs)


def test_more_cached_tokens_than_declared_give_nan_not_wrong_numbers():
    """Symptom: a second chunk without cached_tokens silently ignored the first."""
    layer, x = make_layer(), hidden()
    cache = make_cache()
    prefill(layer, cache, x[:, :9])
    cache.cache_seqlens[0] = 0
    got = prefill(layer, cache, x[:, 9:], start=8)
    assert got[1].isnan().all()
    assert not got[0].isnan().any()


def test_a_row_without_pages_is_zero_and_leaves_the_others_alone():
    layer, x = make_layer(), hidden(rows=3)
    cache = make_cache(rows=3, live=2)
    prefill(layer, cache, x[:, :22])
    got = decode(layer, cache, x[:, 22:])
    assert_same(got[:2], decode(layer, continued(layer, x[:2, :22]), x[:2, 22:]))
    assert torch.equal(got[2], torch.zeros_like(got[2]))


def test_empty_batches_and_chunks_keep_their_shape():
    layer, cache = make_layer(), make_cache()
    for rows, tokens in ((0, 1), (2, 0)):
        x = hidden(rows=rows, tokens=tokens)
        assert prefill(layer, cache, x).shape == x.shape
        assert decode(layer, cache, x).shape == x.shape


def test_a_cast_model_decodes_like_one_built_in_that_dtype():
    """Symptom: .to(dtype) after construction rounded the rotary frequencies or moved the cache."""
    layer, x = make_layer(torch.float32), hidden(torch.bfloat16)
    built = MLAAttention(layer.config, dtype=torch.bfloat16)
    built.load_state_dict(layer.state_dict())
    cast = copy.deepcopy(layer).bfloat16()
    outs = []
    for candidate in (built, cast):
        cache = make_cache(dtype=torch.bfloat16)
        prefill(candidate, cache, x[:, :22])
        outs.append(decode(candidate, cache, x[:, 22:]))
    assert torch.equal(*outs)
    exact = decode(
        layer.double(), continued(layer.double(), x[:, :22].double()), x[:, 22:].double()
    )
    error = (outs[0].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 3e-2
