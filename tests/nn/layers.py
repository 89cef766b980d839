"""A small random layer, a hostile cache, and steps over them."""

import torch

from mla_ops.cache import PagedKVCache
from mla_ops.nn import MLAAttention, MLAConfig

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "no-q-lora": {"q_lora_rank": None},
    "yarn": {"rope_scaling": YARN},
    "half-split": {"rope_interleave": False},
    "bias": {"attention_bias": True},
    "no-q-lora-yarn-half": {
        "q_lora_rank": None,
        "rope_scaling": YARN,
        "rope_interleave": False,
    },
}
B, TOKENS = 2, 23


def make_layer(dtype=torch.float64, **change):
    layer = MLAAttention(MLAConfig(**SIZES | change), dtype=dtype)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return layer


def make_cache(rows=B, dtype=torch.float64, layers=1, page_size=16, live=None):
    """A hostile cache: NaN in every slot, pages of rows interleaved, a table tail of garbage."""
    cache = PagedKVCache(
        *(layers, rows, 64),
        latent_dim=128,
        rope_dim=32,
        page_size=page_size,
        dtype=dtype,
    )
    for tokens in (16, 32):
        for row in reversed(range(rows if live is None else live)):
            cache.allocate(row, tokens)
    cache.block_table[:, 32 // page_size :] = 2147480000
    for layer in range(layers):
        cache.kv_cache(layer).fill_(float("nan"))
    return cache


def advance(cache, batch, tokens):
    slot_mapping = cache.advance_(batch, tokens)
    lengths = cache.cache_seqlens.narrow(0, 0, batch).unsqueeze(1)
    return lengths - tokens + torch.arange(tokens), slot_mapping


def prefill(layer, cache, x, start=0, **options):
    positions, slot_mapping = advance(cache, x.shape[0], x.shape[1])
    return layer.prefill(x, positions, cache, 0, slot_mapping, cached_tokens=start, **options)


def decode(layer, cache, x, **options):
    positions, slot_mapping = advance(cache, x.shape[0], x.shape[1])
    return layer(x, positions, cache, 0, slot_mapping, **options)


def hidden(dtype=torch.float64, rows=B, tokens=TOKENS):
    return torch.randn(rows, tokens, SIZES["hidden_size"], dtype=dtype)


def assert_same(got, expected, atol=1e-10):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def continued(layer, x):
    cache = make_cache()
    prefill(layer, cache, x)
    return cache
