"""RoPE equals transformers' bit for bit, and keeps its frequencies through casts and moves."""

import pytest
import torch

from mla_ops.nn.rope import RotaryEmbedding, apply_rope, inverse_frequencies, yarn_mscale

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(32)],
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "none": None,
    "yarn": YARN,
    "yarn-bare": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn-kimi": YARN | {"factor": 32.0, "beta_fast": 1.0, "mscale_all_dim": 1.0},
    "yarn-given": YARN | {"attention_factor": 0.9, "truncate": False},
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"factor": 4.0},
}
POSITIONS = torch.tensor([[0, 1, 2, 63], [4095, 4096, 100003, 163839]])


def transformers_rotary(scaling, theta=50000.0):
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = pytest.importorskip("transformers").DeepseekV3Config(
        max_position_embeddings=8192,
        rope_parameters=dict(scaling or {"rope_type": "default"}) | {"rope_theta": theta},
    )
    return module, module.DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers_bit_for_bit(name, interleaved, dtype):
    module, theirs = transformers_rotary(SCALINGS[name])
    # Beyond its original context transformers switches longrope's factors; we refuse such models.
    positions = POSITIONS.clamp(max=8191) if "longrope" in name else POSITIONS
    q = torch.randn(2, 4, 3, 64).to(dtype)
    k = torch.randn(2, 4, 64).to(dtype)
    expected_q, expected_k = getattr(
        module, "apply_rotary_pos_emb" + ("_interleave" if interleaved else "")
    )(q.transpose(1, 2), k.unsqueeze(1), *theirs(q, positions))

    ours = RotaryEmbedding(64, 50000.0, SCALINGS[name], 8192)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_scaling
    cos, sin = ours(positions, dtype)
    got_q = apply_rope(q, cos.unsqueeze(2), sin.unsqueeze(2), interleaved=interleaved)
    assert torch.equal(got_q.transpose(1, 2), expected_q)
    got_k = apply_rope(k, cos, sin, interleaved=interleaved)
    assert torch.equal(got_k.unsqueeze(1), expected_k)


@pytest.mark.parametrize("interleaved", [True, False])
def test_logits_depend_on_the_distance_only(interleaved):
    rotary = RotaryEmbedding(32, 10000.0)
    q, k = torch.randn(2, 1, 32, dtype=torch.float64)

    def logit(q_at, k_at):
        positions = torch.tensor([q_at, k_at])
        cos, sin = rotary(positions, torch.float64)
        rotated_q = apply_rope(q, cos[:1], sin[:1], interleaved=interleaved)
        return (rotated_q * apply_rope(k, cos[1:], sin[1:], interleaved=interleaved)).sum()

    torch.testing.assert_close(logit(5, 2), logit(905, 902), rtol=0, atol=1e-3)
    torch.testing.assert_close(logit(7, 7), (q * k).sum(), rtol=0, atol=1e-5)
    assert abs(logit(5, 2) - logit(5, 3)) > 1e-2


def test_a_cast_of_the_model_does_not_round_the_frequencies():
    """Symptom: garbage beyond a few thousand tokens after model.bfloat16()."""
    rotary = RotaryEmbedding(64, 10000.0, YARN)
    expected = rotary.inv_freq.clone()
    for cast in (rotary.bfloat16, rotary.half, rotary.double):
        cast()
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, expected)


def test_materialising_a_meta_module_sets_the_frequencies():
    """Symptom: to_empty leaves a buffer that no checkpoint holds uninitialised."""
    with torch.device("meta"):
        rotary = RotaryEmbedding(64, 10000.0, YARN)
    assert rotary.inv_freq.is_meta
    rotary.to_empty(device="cpu")
    assert torch.equal(rotary.inv_freq, inverse_frequencies(64, 10000.0, YARN)[0])
    assert not rotary.state_dict()


def test_yarn_mscale():
    assert yarn_mscale(1.0, 1.0) == 1.0
    assert yarn_mscale(40.0, 1.0) == pytest.approx(1.3688879454)


@pytest.mark.parametrize(
    ("scaling", "context", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, "rope_scaling must be None or one of"),
        (LONGROPE, 8193, "max_position_embeddings must be at most"),
    ],
)
def test_scalings_that_depend_on_the_length_are_refused(scaling, context, message):
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(64, 10000.0, scaling, context)
