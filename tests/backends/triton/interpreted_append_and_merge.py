"""Run by test_interpreted.py: append_kv_ and merge_states against the reference."""

import pytest
import torch

from mla_ops.backends import cpu, reference
from mla_ops.backends.triton import append, merge

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (512, 0), (128, 32)])
def test_append_writes_exactly_the_valid_slots_of_a_padded_pool(dtype, latent, rope):
    torch.manual_seed(0)
    pool = torch.randn(5, 10, 1, latent + rope + 8).to(dtype)
    ours, expected = pool.clone(), pool.clone()
    kv_c = torch.randn(4, latent + 3).to(dtype)[:, :latent]
    k_pe = torch.randn(4, rope).to(dtype)
    slots = torch.tensor([0, -1, 39, 40])
    for backend, memory in ((append, ours), (cpu, expected)):
        backend.append_kv_(memory[:, :8, :, : latent + rope], kv_c, k_pe, slots)
    assert torch.equal(ours, expected)
    assert (ours != pool).any(-1).sum() == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_ignores_empty_shards_whatever_they_hold(dtype):
    torch.manual_seed(0)
    outs = torch.randn(3, 2, 2, 5, 128).to(dtype)
    lses = torch.randn(3, 2, 5, 2)
    lses[0, 0] = -torch.inf
    outs[0, 0] = float("nan")
    lses[:, 1, 2] = -torch.inf
    results = []
    for backend in (merge, reference):
        out = torch.full((2, 2, 5, 128), float("nan"), dtype=dtype)
        lse = torch.full((2, 2, 5), float("nan")).transpose(1, 2)
        backend.merge_states(outs, lses, out, lse)
        results.append((out.double(), lse))
    (out, lse), (expected, expected_lse) = results
    rounding = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}.get(dtype, 1e-7)
    assert (out - expected).norm() <= rounding * expected.norm()
    torch.testing.assert_close(lse, expected_lse)
    assert (out[1, :, 2] == 0).all()
