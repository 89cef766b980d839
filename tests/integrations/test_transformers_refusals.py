"""patch refuses what it does not serve, and never patches half a model."""

import re

import pytest
import torch

pytest.importorskip("transformers", minversion="5.16")

import transformers
from tiny_models import prompts, tiny_model

from mla_ops.integrations.transformers import patch, verify
from mla_ops.integrations.transformers_version import require_supported


@pytest.fixture
def model():
    return tiny_model("deepseek_v3")


def forward(model, ids, mask=None, **kwargs):
    return model(input_ids=ids, attention_mask=mask, **kwargs).logits


def test_training_mode_is_refused(model):
    model.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        patch(model)
    model.eval()
    patch(model)
    model.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        forward(model, prompts()[0])


def test_output_attentions_is_refused(model):
    patch(model)
    with pytest.raises(ValueError, match="output_attentions"):
        forward(model, prompts()[0], output_attentions=True)


def test_unknown_arguments_are_refused(model):
    """Symptom when they are dropped: sinks ignored, logits off by 6, no error."""
    patch(model)
    with pytest.raises(TypeError, match="got position_bias of type Tensor"):
        forward(model, prompts()[0], position_bias=torch.zeros(1))


def test_models_without_latents_are_refused():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="LlamaForCausalLM without any"):
        patch(transformers.LlamaForCausalLM(config).eval())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 96}, r"\(kv_lora_rank, qk_rope_head_dim\) = \(96, 32\)"),
        ({"num_attention_heads": 129, "num_key_value_heads": 129}, "129 heads"),
    ],
)
def test_unserved_dimensions_are_skipped_whole(changes, reason):
    model = tiny_model("deepseek_v3", **changes)
    ids, mask = prompts()
    before = forward(model, ids, mask)
    report = patch(model)
    assert not report.layers
    assert len(report.skipped) == 2
    assert re.search(reason, report.skipped[0].reason)
    assert torch.equal(forward(model, ids, mask), before)
    assert "expand_kv" not in model.model.layers[0].self_attn.__dict__
    with pytest.raises(ValueError, match="must be one that patch serves"):
        verify(model, ids)


def test_one_unserved_layer_leaves_the_whole_model_alone(model):
    model.model.layers[1].self_attn.sliding_window = 16
    report = patch(model)
    assert not report.layers
    assert report.skipped[0].reason == "sliding window of 16 tokens"
    assert "only together with" in report.skipped[1].reason
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.15.3", "unknown"])
def test_old_releases_are_refused(version):
    with pytest.raises(ImportError, match="caches expanded keys and values"):
        require_supported(version)


def test_new_releases_are_accepted():
    require_supported("5.16.0")
    require_supported("6.0.0.dev0")
