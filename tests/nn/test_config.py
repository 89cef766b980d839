"""MLAConfig reads presets and transformers' configs, and refuses attention that differs."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from mla_ops.nn import MLAAttention, MLAConfig
from mla_ops.presets import PRESETS

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
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
UNSERVED = {"glm-5", "longcat-flash", "minicpm3-4b"}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - UNSERVED))
def test_presets_give_the_published_scale(name):
    config = MLAConfig.preset(name)
    assert config.softmax_scale == pytest.approx(PRESETS[name].softmax_scale, rel=1e-12)
    with torch.device("meta"):
        layer = MLAAttention(config)
    assert layer.kv_a_proj_with_mqa.weight.shape[0] == PRESETS[name].head_dim
    assert layer.rotary.attention_factor == 1.0


def test_deepseek_v3_s_scale_is_not_that_of_the_cached_width():
    assert MLAConfig.preset("deepseek-v3").softmax_scale == pytest.approx(0.1352337788)
    assert MLAConfig(**SIZES).softmax_scale == pytest.approx(48**-0.5)


def test_kimi_k2_ramps_at_one_rotation():
    """Symptom: Kimi-K2 degrades with context, its config has beta_fast = 1, not 32."""
    assert MLAConfig.preset("kimi-k2").rope_scaling["beta_fast"] == 1.0
    assert MLAConfig.preset("deepseek-v3").rope_scaling["beta_fast"] == 32.0


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_presets_whose_attention_differs_are_refused(name):
    with pytest.raises(ValueError, match=f"MLAConfig: preset must be .* got '{name}'"):
        MLAConfig.preset(name)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="MLAConfig: preset must be one of"):
        MLAConfig.preset("deepseek-v9")


@pytest.mark.parametrize(
    "scaling", [None, YARN, {k: v for k, v in YARN.items() if "all" not in k}]
)
def test_reads_transformers_5(scaling):
    transformers = pytest.importorskip("transformers")
    parameters = dict(scaling or {"rope_type": "default"}) | {"rope_theta": 5e4}
    theirs = transformers.DeepseekV3Config(**SIZES, rope_parameters=parameters)
    config = MLAConfig.from_transformers(theirs)
    for name, value in SIZES.items():
        assert getattr(config, name) == value
    assert config.rope_theta == 5e4
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    assert config.softmax_scale == module.DeepseekV3Attention(theirs, 0).scaling


def test_reads_transformers_4_names():
    old = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
    config = MLAConfig.from_transformers(
        SimpleNamespace(
            **SIZES,
            model_type="kimi_k2",
            rope_theta=50000.0,
            rope_scaling=old,
            max_position_embeddings=163840,
        )
    )
    assert config.rope_theta == 50000.0
    assert config.softmax_scale == pytest.approx(48**-0.5 * 1.3688879454**2)
    assert config.rope_interleave


@pytest.mark.parametrize("model_type", ["longcat_flash", "deepseek_v32", "mistral4", "llama"])
def test_models_whose_attention_differs_are_refused(model_type):
    theirs = SimpleNamespace(**SIZES, model_type=model_type, max_position_embeddings=64)
    with pytest.raises(ValueError, match="MLAConfig: model_type must be one of"):
        MLAConfig.from_transformers(theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be >= 1, got 0"),
        ({"q_lora_rank": 0}, "q_lora_rank must be None or >= 1, got 0"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim must be even, got 33"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling must be None or one of"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling must be with 'factor' for yarn"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=f"MLAConfig: {message}"):
        MLAConfig(**SIZES | change)


def test_a_config_is_frozen_hashable_and_pickles():
    scaling = dict(YARN)
    config = MLAConfig(**SIZES, rope_scaling=scaling)
    scaling["factor"] = 1.0
    assert config.rope_scaling["factor"] == 40.0
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(MLAConfig(**SIZES, rope_scaling=YARN))
    with pytest.raises(AttributeError):
        config.hidden_size = 1
