"""The CPU backend: serves CPU tensors only, keeps to its error budget, copies no pool."""

import oracle
import pytest
import torch

from mla_ops.backends import cpu, reference
from mla_ops.testing import assert_close_to_fp64
from mla_ops.testing.inputs import make_decode_inputs


def decode(backend, inputs, **options):
    batch, seqlen_q, heads, _ = inputs.q.shape
    out = torch.full((batch, seqlen_q, heads, inputs.head_dim_v), float("nan")).to(inputs.q.dtype)
    lse = torch.full((batch, heads, seqlen_q), float("nan"))
    backend.mla_decode_out(
        *inputs[:4], None, None, out, lse,
        softmax_scale=inputs.softmax_scale,
        **{"causal": True, "attn_sink": None, **options},
    )  # fmt: skip
    return out, lse


def test_serves_cpu_tensors_only():
    assert cpu.unavailable(torch.device("cpu")) == []
    assert cpu.unavailable(torch.device("cuda")) == ["reads CPU memory, the tensors are on cuda"]


def test_never_reads_more_of_the_pool_than_the_lengths(monkeypatch):
    """A pool of gigabytes must not be widened or copied for a batch of a few tokens."""
    inputs = make_decode_inputs((70, 3), num_heads_q=2, spare_pages=50, dtype=torch.bfloat16)
    largest = 0
    for name in ("empty", "index_select"):
        original = getattr(torch, name)

        def watch(*args, original=original, **kwargs):
            nonlocal largest
            result = original(*args, **kwargs)
            largest = max(largest, result.numel())
            return result

        monkeypatch.setattr(torch, name, watch)
    decode(cpu, inputs)
    # Two pages hold the longest sequence.
    assert largest == 2 * 64 * 576


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_not_rounded(dtype):
    """Symptom: a bfloat16 product of q and keys rounds the logits; out errs by 1.2 percent."""
    inputs = make_decode_inputs((2000,), num_heads_q=16, dtype=dtype, softmax_scale=576**-0.5)
    expected, _ = oracle.decode(*inputs)
    out, _ = decode(cpu, inputs)
    low, _ = decode(reference, inputs)
    assert_close_to_fp64(out, expected, reference_low=None)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 3 * (low.double() - expected).norm() / expected.norm()


def test_sequences_do_not_see_each_others_keys():
    """The gathered keys of a long sequence stay in the buffer that the next, shorter one uses."""
    long_first = make_decode_inputs((130, 3), num_heads_q=2, dtype=torch.float32)
    out, _ = decode(cpu, long_first)
    expected, _ = oracle.decode(*long_first)
    assert_close_to_fp64(out, expected)


def test_a_lost_page_between_two_good_ones():
    inputs = make_decode_inputs((130,), num_heads_q=2, dtype=torch.float32)
    inputs.block_table[0, 1] = -1
    out, _ = decode(cpu, inputs)
    assert_close_to_fp64(out, oracle.decode(*inputs)[0])
    inputs.block_table[0, :3] = 2147480000
    out, lse = decode(cpu, inputs)
    assert bool((out == 0).all())
    assert bool(lse.isneginf().all())
