"""Absorbing kv_b_proj is exact algebra: float64 agrees to rounding."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_ops.nn import absorb
from mla_ops.nn.absorb import absorb_q, expand_out, expand_wide_out, split_kv_b

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


LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Half a unit in the last place, evenly spread: what one rounding costs.
ROUNDING = {dtype: torch.finfo(dtype).eps / 12**0.5 for dtype in (torch.bfloat16, torch.float16)}


def wide_tensors(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16 * (128 + 64), 256, generator=generator).mul(0.05).to(dtype)
    latents = torch.randn(3, 2, 16, 256, generator=generator)
    return latents.to(device), split_kv_b(weight.to(device), 16, 128, 64)[1]


def check_wide(expand, latents, w_uv):
    """One rounding: rounding the latents first would cost 1.4 times as much."""
    out = expand(latents, w_uv)
    expected = expand_out(latents.double(), w_uv.double())
    assert out.dtype == w_uv.dtype
    assert out.shape == expected.shape
    assert (out - expected).norm() <= ROUNDING[w_uv.dtype] * expected.norm()
    twice = expand_out(latents.to(w_uv.dtype).double(), w_uv.double()).to(w_uv.dtype)
    assert (out - expected).norm() < 0.8 * (twice - expected).norm()


@LOW
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_wide_latents_are_rounded_once(dtype, compiled):
    torch._dynamo.reset()
    check_wide(
        torch.compile(expand_wide_out) if compiled else expand_wide_out, *wide_tensors(dtype)
    )


@pytest.mark.gpu
@LOW
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_wide_latents_are_rounded_once_on_cuda(dtype, compiled):
    torch._dynamo.reset()
    expand = torch.compile(expand_wide_out, mode="reduce-overhead", fullgraph=True)
    arguments = wide_tensors(dtype, "cuda")
    for _ in range(3):
        check_wide(expand if compiled else expand_wide_out, *arguments)


@LOW
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_halves_hold_what_one_drops(dtype, compiled):
    """Symptom of a plain conversion: compiled, the second half is 0 and the first one all."""
    torch._dynamo.reset()
    halves = torch.compile(absorb._halves) if compiled else absorb._halves
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    high, low = halves(x, dtype)
    assert high.dtype == low.dtype == dtype
    assert ((high.double() + low.double() - x).abs() <= x.abs() * 2**-15 + 2**-24).all()


@LOW
def test_on_cuda_the_weights_are_read_once_as_they_are(dtype):
    """As a trace, without a device: one product, of the weight itself, in float32."""
    with FakeTensorMode():
        latents = torch.empty(3, 2, 16, 256, device="cuda")
        w_uv = torch.empty(16, 192, 256, dtype=dtype, device="cuda").narrow(1, 128, 64)
        assert expand_wide_out(latents, w_uv).shape == (3, 2, 16, 64)
        nothing = torch.empty(0, 2, 16, 256, device="cuda")
        assert expand_wide_out(nothing, w_uv).shape == (0, 2, 16, 64)
        nodes = make_fx(expand_wide_out)(latents, w_uv).graph.nodes
    (product,) = (n for n in nodes if n.target is torch.ops.aten.bmm.dtype)
    assert product.args[0].meta["val"].shape == (16, 12, 256)
    assert product.args[1].args[0].op == "placeholder"
    assert product.meta["val"].dtype == torch.float32
