"""Tiny random models of every MLA architecture, with hostile prompts: padded on the left."""

import inspect

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

DENSE = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "longcat_flash"),
    *("youtu", "mistral4", "axk1", "sarvam_mla"),
)
SPARSE = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")
HYBRID = ("bailing_hybrid", "kimi_linear")

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SPARSE = {"index_topk": 8, "index_head_dim": 64, "index_n_heads": 2}
_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "num_local_experts": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "head_dim": 16,
}
_SPECIAL = {
    "minicpm3": {"kv_lora_rank": 256, "dim_model_base": 64},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "head_dim": 32,
        "num_hidden_layers": 4,
    },
    "deepseek_v3": {"first_k_dense_replace": 1},
    "sarvam_mla": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "axk2": {"n_group": None, "topk_group": None},
    "hy_v4": {"indexer_types": ["full", "shared"], "learnable_sink_init": 1.0},
    "mistral4": {
        "qk_nope_head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
}


def tiny_config(model_type, **changes):
    settings = dict(_COMMON)
    if model_type in SPARSE:
        settings |= _SPARSE
    if model_type in HYBRID:
        settings |= _HYBRID
    return AutoConfig.for_model(model_type, **settings | _SPECIAL.get(model_type, {}) | changes)


def tiny_model(model_type, *, dtype=torch.float32, seed=0, **changes):
    """Build a model with weights large enough that every layer matters to the logits."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    if model_type == "mistral4":
        # Registered as the text part of a vision model only.
        model = transformers.Mistral4ForCausalLM(config).eval()
    else:
        model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "conv" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
        elif "sink" in name:
            torch.nn.init.normal_(parameter, mean=1.0)
    return model.to(dtype)


def prompts(batch=3, length=20, seed=1):
    """Return (input_ids, attention_mask), every row padded differently."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : (row * 7) % length] = 0
    return ids.masked_fill(mask == 0, 0), mask


def known(model_type):
    """Tell whether the installed transformers has the architecture."""
    return model_type in transformers.CONFIG_MAPPING


def cache_name(model):
    """Name the argument of forward that takes the cache: it changed with transformers 5.24."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"
