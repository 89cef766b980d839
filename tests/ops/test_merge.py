"""merge_states: shards merge to the unsplit result; empty shards are neutral."""

import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_ops import merge_states, mla_decode
from mla_ops.backends import cpu, reference
from mla_ops.shapes import lse_strides
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.inputs import make_decode_inputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def merge_into(kernel):
    def merge(outs, lses):
        _, batch, seqlen_q, heads, width = outs.shape
        out = torch.full((batch, seqlen_q, heads, width), math.nan, dtype=outs.dtype)
        lse = torch.full((batch, heads, seqlen_q), math.nan)
        kernel(outs, lses, out, lse)
        return out, lse

    return merge


MERGES = {
    "operator": merge_states,
    "cpu": merge_into(cpu.merge_states),
    "reference": merge_into(reference.merge_states),
}


def shard(inputs, index, count):
    """Return the inputs of one of ``count`` interleaved shards: every count-th page."""
    page_size = inputs.kv_cache.shape[1]
    assert page_size == 1
    lengths = torch.tensor([len(range(index, n, count)) for n in inputs.cache_seqlens.tolist()])
    table = inputs.block_table[:, index::count].contiguous()
    return inputs._replace(block_table=table, cache_seqlens=lengths.int())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("shards", [2, 4])
def test_interleaved_shards_equal_the_unsplit_result(shards, merge, dtype):
    """Sequences shorter than the number of shards leave some shards without keys."""
    inputs = make_decode_inputs(
        (0, 1, 3, 70), num_heads_q=5, latent_dim=128, rope_dim=32, page_size=1, dtype=dtype,
        seqlen_q=2, spare_columns=4,
    )  # fmt: skip
    parts = [
        mla_decode(
            *shard(inputs, index, shards)[:4],
            softmax_scale=inputs.softmax_scale,
            head_dim_v=128,
            causal=False,
        )
        for index in range(shards)
    ]
    outs = torch.stack([part.out for part in parts])
    lses = torch.stack([part.lse for part in parts])
    outs[lses.transpose(2, 3) == -math.inf] = math.nan
    out, lse = MERGES[merge](outs, lses)
    expected, expected_lse = oracle.decode(*inputs, causal=False)
    # The lse of the shards is float32: merged weights are no better than that.
    assert_close_to_fp64(out, expected, dtype=torch.float32 if dtype.itemsize == 8 else None)
    assert_lse_close_to_fp64(lse, expected_lse, atol=1e-5 if dtype.itemsize > 2 else 1e-3)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_shard_is_neutral_whatever_it_holds(position, merge, junk):
    outs, lses = torch.randn(2, 2, 3, 4, 8), torch.randn(2, 2, 4, 3)
    plain = MERGES[merge](outs, lses)
    at = [outs[:position], torch.full((1, 2, 3, 4, 8), junk), outs[position:]]
    lse_at = [lses[:position], torch.full((1, 2, 4, 3), -math.inf), lses[position:]]
    out, lse = MERGES[merge](torch.cat(at), torch.cat(lse_at))
    torch.testing.assert_close(out, plain[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, plain[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("shards", [1, 3])
def test_all_shards_empty_is_zero(shards, merge):
    outs = torch.full((shards, 2, 1, 3, 8), math.nan)
    out, lse = MERGES[merge](outs, torch.full((shards, 2, 3, 1), -math.inf))
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_one_shard_is_itself(dtype):
    outs, lses = torch.randn(1, 2, 3, 4, 128).to(dtype), torch.randn(1, 2, 4, 3)
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse, lses[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0, 1, 4, 512), (2, 3, 0, 4, 512), (1, 3, 1, 0, 512)])
def test_empty_sizes(shape):
    shards, batch, seqlen_q, heads, width = shape
    out, lse = merge_states(torch.empty(shape), torch.empty(shards, batch, heads, seqlen_q))
    assert out.shape == (batch, seqlen_q, heads, width)
    assert lse.shape == (batch, heads, seqlen_q)


def test_strides_of_inputs_and_outputs():
    outs = torch.randn(4, 8, 3, 2, 5).permute(4, 3, 2, 0, 1)
    lses = torch.randn(3, 4, 2, 5).permute(3, 2, 1, 0)
    out, lse = merge_states(outs, lses)
    plain = merge_states(outs.contiguous(), lses.contiguous())
    torch.testing.assert_close(out, plain.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, plain.lse, rtol=1e-6, atol=1e-6)
    assert out.is_contiguous()
    assert lse.stride() == lse_strides(3, 4)


@pytest.mark.parametrize("merge", MERGES)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    values=st.lists(
        st.tuples(st.floats(-1e3, 1e3, width=32), st.sampled_from((True, True, False))),
        min_size=1,
        max_size=6,
    )
)
def test_is_the_weighted_mean(merge, values):
    """One row: lse far apart, empty shards anywhere."""
    lses = torch.tensor([lse if full else -math.inf for lse, full in values]).view(-1, 1, 1, 1)
    outs = torch.arange(1.0, len(values) + 1).view(-1, 1, 1, 1, 1).clone()
    outs[lses[..., None] == -math.inf] = math.nan
    out, lse = MERGES[merge](outs, lses)
    full = [(float(lse), k + 1) for k, (lse, present) in enumerate(values) if present]
    if not full:
        assert (out.item(), lse.item()) == (0.0, -math.inf)
        return
    largest = max(lse for lse, _ in full)
    weights = [math.exp(lse - largest) for lse, _ in full]
    total = math.fsum(weights)
    assert lse.item() == pytest.approx(largest + math.log(total), rel=1e-6, abs=1e-4)
    mean = math.fsum(w * k for w, (_, k) in zip(weights, full, strict=True)) / total
    assert out.item() == pytest.approx(mean, rel=1e-4)
