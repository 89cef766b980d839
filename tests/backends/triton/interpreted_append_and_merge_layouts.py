"""Run by test_interpreted.py: append_kv_ and merge_states on hostile layouts and values."""

import math

import oracle
import pytest
import torch

from mla_ops.backends import reference
from mla_ops.backends.triton import append, merge

# Elements. A stride that fits into 32 bits, so that it is passed as such; twice it does not.
FAR = 2**30 + 64
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HOSTILE_SLOTS = [-1, 0, 5, -(1 << 62), 24, 1 << 40, 2**31, 2**32 + 3, 23, (1 << 63) - 1]


def same_bits(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("latent", "rope"), [(512, 64), (512, 0), (256, 64), (256, 32), (128, 32)]
)
@pytest.mark.parametrize("page_size", [1, 6, 24])
def test_append_touches_the_valid_slots_alone(dtype, latent, rope, page_size):
    torch.manual_seed(0)
    pages, head_dim = 24 // page_size, latent + rope
    pool = torch.full((pages + 2, page_size + 1, 1, head_dim + 3), math.nan, dtype=dtype)
    ours, expected = pool.clone(), pool.clone()
    tokens = torch.randn(len(HOSTILE_SLOTS), head_dim + 5).to(dtype)
    kv_c, k_pe = tokens[:, :latent], tokens[:, latent:head_dim]
    slots = torch.tensor(HOSTILE_SLOTS)
    inner = (slice(1, -1), slice(page_size), slice(None), slice(1, head_dim + 1))
    append.append_kv_(ours[inner], kv_c, k_pe, slots)
    expected[inner] = oracle.append(expected[inner], kv_c, k_pe, slots)
    assert same_bits(ours, expected)
    assert not ours[inner].flatten(0, 1)[[0, 5, 23]].isnan().any()


def test_append_keeps_the_bits_of_nan_and_infinity():
    words = torch.tensor([[0x7FC1, 0xFF80, 0x0001, 0x8000] * 40], dtype=torch.int32)
    token = words.to(torch.int16).view(torch.bfloat16)
    pool = torch.zeros(1, 2, 1, 160, dtype=torch.bfloat16)
    append.append_kv_(pool, token[:, :128], token[:, 128:], torch.tensor([1]))
    assert same_bits(pool[0, 1, 0], token[0])
    assert (pool[0, 0] == 0).all()


def test_append_reaches_pages_past_32_bits():
    """Symptom: the token lands in another page once page * stride passes 2**31."""
    memory = torch.empty(2 * FAR + 4096, dtype=torch.float16)  # untouched memory costs nothing
    pool = memory.as_strided((3, 4, 1, 160), (FAR, 160, 160, 1))
    pool.zero_()
    token = torch.randn(1, 160).half()
    append.append_kv_(pool, token[:, :128], token[:, 128:], torch.tensor([9]))
    assert same_bits(pool[2, 1, 0], token[0])
    assert int((pool != 0).any(-1).sum()) == 1


def test_append_of_nothing_does_not_launch(monkeypatch):
    monkeypatch.setattr(append, "_append_kv_kernel", None)
    empty = torch.empty(0, 128), torch.empty(0, 32), torch.empty(0, dtype=torch.int64)
    append.append_kv_(torch.empty(1, 1, 1, 160), *empty)


def merged(backend, outs, lses, out=None, lse=None):
    _, batch, seqlen_q, heads, width = outs.shape
    out = outs.new_full((batch, seqlen_q, heads, width), math.nan) if out is None else out
    lse = torch.full((batch, heads, seqlen_q), math.nan) if lse is None else lse
    backend.merge_states(outs, lses, out, lse)
    return out, lse


@pytest.mark.parametrize("width", [512, 256, 128, 96, 1])
@pytest.mark.parametrize("shards", [1, 2, 9])
def test_merge_of_any_strides_touches_its_views_alone(width, shards):
    torch.manual_seed(0)
    outs = torch.randn(3, 4, 2, width, shards).permute(4, 1, 2, 0, 3)  # V is not the last stride
    lses = torch.randn(2, shards, 4, 3).permute(1, 2, 3, 0)
    out_buffer, lse_buffer = torch.full((2, width + 7, 4, 3), 9.0), torch.full((4, 2, 5), 9.0)
    out = out_buffer[:, 3 : width + 3].permute(2, 0, 3, 1)
    lse = lse_buffer[:, :, 1:4].transpose(1, 2)
    expected, expected_lse = merged(reference, outs.double(), lses)
    merged(merge, outs, lses, out, lse)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert (out_buffer[:, :3] == 9).all()
    assert (out_buffer[:, width + 3 :] == 9).all()
    assert (lse_buffer[:, :, [0, 4]] == 9).all()


@pytest.mark.parametrize("axis", ["shard", "column"])
def test_merge_reads_past_32_bits(axis):
    """Symptom: an illegal access once shard * stride passes 2**31 elements."""
    memory = torch.empty(2 * FAR + 4096, dtype=torch.float16)
    shape, strides = {
        "shard": ((3, 1, 1, 2, 32), (FAR, 64, 64, 32, 1)),
        "column": ((2, 1, 1, 2, 3), (4, 8, 8, 2, FAR)),
    }[axis]
    outs = memory.as_strided(shape, strides)
    outs.copy_(torch.randn(shape))
    lses = torch.randn(shape[0], 1, 2, 1)
    out, _ = merged(merge, outs, lses)
    expected, _ = merged(reference, outs.double(), lses)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_never_reads_an_empty_shard(poison, dtype):
    torch.manual_seed(0)
    outs, lses = torch.randn(4, 2, 1, 3, 128).to(dtype), torch.randn(4, 2, 3, 1)
    full = outs[1:3].clone(), lses[1:3].clone()
    for shard in (0, 3):
        outs[shard], lses[shard] = poison, -math.inf
    ours, alone = merged(merge, outs, lses), merged(merge, *full)
    assert same_bits(ours[0], alone[0])
    assert same_bits(ours[1], alone[1])
    lses[:] = -math.inf
    outs[:] = poison
    out, lse = merged(merge, outs, lses)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_merge_of_far_apart_weights_stays_finite():
    outs = torch.stack([torch.full((1, 1, 2, 32), value) for value in (1.0, 2.0, 3.0)])
    lses = torch.tensor([3e4, -3e4, 3e4]).view(3, 1, 1, 1).expand(3, 1, 2, 1)
    out, lse = merged(merge, outs, lses)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    torch.testing.assert_close(lse, torch.full_like(lse, 3e4 + math.log(2)))


def test_merge_of_float64_accumulates_in_float64():
    torch.manual_seed(0)
    outs, lses = torch.randn(5, 1, 2, 2, 64, dtype=torch.float64), torch.randn(5, 1, 2, 2)
    out, _ = merged(merge, outs, lses)
    expected, _ = merged(reference, outs, lses)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
