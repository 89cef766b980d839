"""The portable decode on a CUDA device against float64: everything it says it serves."""

import pytest
import torch

import mla_ops
from mla_ops.backends import reference
from mla_ops.shapes import LATENT_ROPE_PAIRS
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.inputs import make_decode_inputs

pytestmark = pytest.mark.gpu

DEVICE, BACKEND = "cuda", "triton"
RAGGED = (0, 1, 63, 64, 65, 127, 129, 1000, 2049)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check(lengths=RAGGED, *, causal=True, sink=False, **options):
    """Compare a call with float64, three times bit for bit, and into the caller's tensors.

    A float32 out has only the rounding of the weights: at most 0.71 of the error with out's.
    """
    inputs = make_decode_inputs(lengths, device=DEVICE, **options)
    heads, seqlen_q = inputs.q.shape[2], inputs.q.shape[1]
    attn_sink = torch.linspace(-2.0, 2.0, heads, device=DEVICE) if sink else None
    given = {"softmax_scale": inputs.softmax_scale, "causal": causal, "attn_sink": attn_sink}
    shape = (*inputs.q.shape[:3], inputs.head_dim_v)
    expected = torch.empty(shape, dtype=torch.float64, device=DEVICE)
    expected_lse = torch.empty((shape[0], heads, seqlen_q), dtype=torch.float64, device=DEVICE)
    reference.mla_decode_out(
        *(inputs.q.double(), inputs.kv_cache.double(), *inputs[2:4], None, None),
        *(expected, expected_lse),
        **given,
    )
    given["head_dim_v"] = inputs.head_dim_v
    results = [
        mla_ops.mla_decode(*inputs[:4], backend=BACKEND, **given, **outputs)
        for outputs in (
            *({}, {}),
            {
                "out": torch.full(shape, torch.nan, dtype=inputs.q.dtype, device=DEVICE),
                "lse": torch.full((shape[0], heads, seqlen_q), torch.nan, device=DEVICE),
            },
        )
    ]
    assert_close_to_fp64(results[0].out, expected)
    assert_lse_close_to_fp64(results[0].lse, expected_lse)
    for again in results[1:]:
        assert torch.equal(again.out, results[0].out)
        assert torch.equal(again.lse, results[0].lse)
    out, lse = (torch.full_like(x, torch.nan, dtype=torch.float32) for x in results[0])
    mla_ops.mla_decode(*inputs[:4], backend=BACKEND, **given, out=out, lse=lse)
    assert torch.equal(lse, results[0].lse)
    error, rounded = ((x - expected).norm().item() for x in (out, results[0].out))
    assert error <= (1.0 if inputs.q.dtype == torch.float32 else 0.75) * rounded


@pytest.mark.parametrize("pair", LATENT_ROPE_PAIRS, ids=lambda pair: f"{pair[0]}_{pair[1]}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_and_types(pair, dtype):
    check(latent_dim=pair[0], rope_dim=pair[1], dtype=DTYPES[dtype])


@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_page_sizes(page_size, dtype):
    check(page_size=page_size, dtype=DTYPES[dtype])


@pytest.mark.parametrize("heads", [1, 5, 16, 63, 64, 128])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_heads_and_queries(heads, seqlen_q, causal):
    check(num_heads_q=heads, seqlen_q=seqlen_q, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [16, 128])
def test_sinks(heads, dtype):
    check(num_heads_q=heads, dtype=DTYPES[dtype], sink=True, seqlen_q=2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_no_sequence_owns_is_not_read(poison):
    check(poison=poison, padded_rows=True, padded_pages=True, strided_q=True, seqlen_q=3)
    check(poison=poison, page_size=1, latent_dim=128, rope_dim=32)


@pytest.mark.parametrize("batch", [1, 2, 9, 33, 130])
def test_batches(batch):
    check([(37 * row) % 700 for row in range(batch)], page_size=16)
    check([5000] + [1] * (batch - 1))
