"""Absorbing kv_b_proj is exact algebra: float64 agrees to rounding."""

import pytest
import torch

from mla_ops.nn.absorb import absorb_q, expand_out, split_kv_b

H, NOPE, V, LATENT, T = 3, 16, 24, 32, 65


def tensors():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return randn(H * (NOPE + V), LATENT), randn(2, 4, H, NOPE), randn(2, T, LATENT)


def test_split_views_the_weight_as_the_checkpoint_lays_it_out():
    weight, _, latents = tensors()
    w_uk, w_uv = split_kv_b(weight, H, NOPE, V)
    assert w_uk.shape == (H, NOPE, LATENT)
    assert w_uv.shape == (H, V, LATENT)
    assert w_uk.data_ptr() == weight.data_ptr()
    assert w_uv.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    expanded = (latents @ weight.T).view(2, T, H, NOPE + V)
    keys = torch.einsum("btl,hnl->bthn", latents, w_uk)
    values = torch.einsum("btl,hvl->bthv", latents, w_uv)
    torch.testing.assert_close(torch.cat((keys, values), -1), expanded, rtol=0, atol=1e-12)


def test_absorbed_attention_equals_expanded_attention():
    weight, q_nope, latents = tensors()
    w_uk, w_uv = split_kv_b(weight, H, NOPE, V)
    expanded = (latents @ weight.T).view(2, T, H, NOPE + V)
    keys, values = expanded.split((NOPE, V), dim=-1)
    weights = torch.einsum("bshn,bthn->bsht", q_nope, keys).mul(0.05).softmax(-1)
    expected = torch.einsum("bsht,bthv->bshv", weights, values)

    logits = torch.einsum("bshl,btl->bsht", absorb_q(q_nope, w_uk), latents)
    out_latent = torch.einsum("bsht,btl->bshl", logits.mul(0.05).softmax(-1), latents)
    torch.testing.assert_close(expand_out(out_latent, w_uv), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(0, 1), (3, 0), (1, 1)], ids=str)
def test_empty_and_single_tokens_keep_their_shape(shape):
    w_uk, w_uv = split_kv_b(tensors()[0], H, NOPE, V)
    latent = absorb_q(torch.ones(*shape, H, NOPE, dtype=torch.float64), w_uk)
    assert latent.shape == (*shape, H, LATENT)
    assert expand_out(latent, w_uv).shape == (*shape, H, V)


def test_another_rank_s_weight_is_refused():
    with pytest.raises(ValueError, match=r"split_kv_b: weight must be .* with 160 rows, got"):
        split_kv_b(tensors()[0], H + 1, NOPE, V)
