"""Run by test_interpreted.py: decode against float64, hostile inputs, split and whole."""

import inspect

import oracle
import pytest
import torch

from mla_ops.backends.triton import decode
from mla_ops.shapes import LATENT_ROPE_PAIRS
from mla_ops.testing.inputs import make_decode_inputs
from mla_ops.testing.numerics import assert_close_to_fp64, assert_lse_close_to_fp64

SMALL = {"latent_dim": 128, "rope_dim": 32}
POISON = float("nan")


def run(inputs, *, causal=True, attn_sink=None, out=None, lse=None):
    batch, seqlen_q, heads, _ = inputs.q.shape
    if out is None:
        out = inputs.q.new_full((batch, seqlen_q, heads, inputs.head_dim_v), POISON)
    if lse is None:
        lse = torch.full((batch, seqlen_q, heads), POISON).transpose(1, 2)
    decode.mla_decode_out(
        *(*inputs[:4], None, None, out, lse),
        softmax_scale=inputs.softmax_scale,
        causal=causal,
        attn_sink=attn_sink,
    )
    return out, lse


def check(inputs, *, causal=True, attn_sink=None, out=None, lse=None):
    expected = oracle.decode(*inputs, causal=causal, attn_sink=attn_sink)
    out, lse = run(inputs, causal=causal, attn_sink=attn_sink, out=out, lse=lse)
    assert_close_to_fp64(out, expected[0])
    assert_lse_close_to_fp64(lse, expected[1])
    return out, lse


@pytest.mark.parametrize("pair", LATENT_ROPE_PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_pair_and_dtype(pair, dtype):
    latent, rope = pair
    check(
        make_decode_inputs((0, 65), latent_dim=latent, rope_dim=rope, dtype=dtype, num_heads_q=3)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_out_is_not_rounded(dtype):
    """Split and whole sequences, strided: within float32's budget of float64."""
    inputs = make_decode_inputs((700, 0, 65), seqlen_q=2, num_heads_q=3, dtype=dtype, **SMALL)
    out = torch.full((3, 3, 2, 131), POISON)[..., :128].transpose(1, 2)
    check(inputs, attn_sink=torch.linspace(-2, 2, 3), out=out)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256, 48])
def test_every_page_size_with_queries_that_see_nothing(page_size, causal):
    inputs = make_decode_inputs(
        (2, 0, 130, 63), seqlen_q=4, num_heads_q=4, page_size=page_size, **SMALL
    )
    check(inputs, causal=causal)


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_float32_of_pages_around_its_tile(page_size):
    check(
        make_decode_inputs(
            (2, 47), seqlen_q=2, num_heads_q=5, page_size=page_size, dtype=torch.float32, **SMALL
        )
    )


@pytest.mark.parametrize(
    ("heads", "seqlen_q"), [(1, 1), (17, 1), (64, 1), (128, 1), (3, 7), (24, 8)]
)
def test_every_number_of_row_groups(heads, seqlen_q):
    sink = torch.linspace(-2, 2, heads)
    inputs = make_decode_inputs((130, 1), num_heads_q=heads, seqlen_q=seqlen_q, **SMALL)
    check(inputs, attn_sink=sink)


def test_one_sequence_over_all_programs_then_replayed_with_other_lengths():
    """Empty, whole and split sequences from the same launch: only the lengths change."""
    inputs = make_decode_inputs((700, 640, 0, 66), num_heads_q=2, **SMALL)
    for lengths in ((700, 0, 0, 0), (0, 640, 0, 1), (64, 64, 0, 64), (1, 577, 0, 66), (0,) * 4):
        inputs.cache_seqlens.copy_(torch.tensor(lengths))
        check(inputs)


def test_pages_outside_the_pool_are_absent_keys():
    inputs = make_decode_inputs((300, 64, 200), num_heads_q=4, **SMALL)
    inputs.block_table[0, 1] = -1
    inputs.block_table[1, 0] = inputs.kv_cache.shape[0]
    inputs.block_table[2, 3] = -2147483648
    _, lse = check(inputs)
    assert bool((lse[1] == -torch.inf).all())


def test_pages_outside_the_pool_are_absent_tokens_of_small_pages():
    inputs = make_decode_inputs((75,), page_size=16, num_heads_q=4, **SMALL)
    inputs.block_table[0, 2] = 2147480000
    check(inputs)


def test_lengths_are_clamped_to_the_table():
    inputs = make_decode_inputs((128, 128), num_heads_q=2, spare_columns=0, **SMALL)
    exact, _ = run(inputs)
    inputs.cache_seqlens.copy_(torch.tensor((2147483647, 129)))
    clamped, _ = run(inputs)
    assert torch.equal(clamped, exact)
    inputs.cache_seqlens.copy_(torch.tensor((-5, -2147483648)))
    out, lse = run(inputs)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_strided_arguments_and_gaps(poison):
    """Gaps of inputs hold the poison; gaps of outputs must keep what they hold."""
    inputs = make_decode_inputs(
        (65, 0, 3),
        seqlen_q=2,
        num_heads_q=3,
        page_size=16,
        poison=poison,
        strided_q=True,
        padded_rows=True,
        padded_pages=True,
        **SMALL,
    )
    table = torch.full((3, 2 * inputs.block_table.shape[1]), -7, dtype=torch.int32)
    table[:, : inputs.block_table.shape[1]] = inputs.block_table
    inputs = inputs._replace(block_table=table[:, : inputs.block_table.shape[1]])
    out = torch.full((3, 3, 128, 5), 7.0, dtype=inputs.q.dtype)
    lse = torch.full((2, 4, 3), 7.0)
    check(inputs, out=out[..., 1:3].permute(0, 3, 1, 2), lse=lse[:, :3].permute(2, 1, 0))
    assert bool((out[..., 0] == 7).all())
    assert bool((out[..., 3:] == 7).all())
    assert bool((lse[:, 3] == 7).all())


def test_rows_farther_apart_than_int32():
    """A cache laid out token by token: [P, N, D] in memory, offsets past 2**31 elements."""
    inputs = make_decode_inputs((64,), num_heads_q=1, spare_pages=0, **SMALL)
    stride = 2**31 // 48
    # Virtual memory only: what is never touched costs nothing.
    memory = torch.empty(64 * stride, dtype=inputs.q.dtype)
    far = memory.as_strided((1, 64, 1, 160), (160, stride, stride, 1))
    far.copy_(inputs.kv_cache)
    check(inputs._replace(kv_cache=far))


def test_an_infinite_sink_takes_everything_and_nothing():
    inputs = make_decode_inputs((70, 0), num_heads_q=4, **SMALL)
    sink = torch.tensor((-torch.inf, torch.inf, 100.0, 0.0))
    out, _ = run(inputs, attn_sink=sink)
    plain, _ = run(inputs)
    assert torch.equal(out[0, 0, 0], plain[0, 0, 0])
    assert bool((out[0, 0, 1] == 0).all())
    assert bool((out[1] == 0).all())
    assert bool(out.isfinite().all())


def test_batches_beyond_the_largest_block_are_planned_in_chunks(monkeypatch):
    monkeypatch.setattr(decode, "_BATCH_BLOCKS", (1, 2))
    decode._launch.cache_clear()
    lengths = (0, 65, 1, 300, 64, 0, 130)
    try:
        check(make_decode_inputs(lengths, num_heads_q=2, **SMALL))
    finally:
        decode._launch.cache_clear()


def test_three_runs_are_bit_equal():
    inputs = make_decode_inputs((200, 65, 0), num_heads_q=2, **SMALL)
    first = run(inputs)
    for _ in range(2):
        again = run(inputs)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def test_the_launch_never_looks_at_values():
    """Symptom: a host sync on the decode path breaks CUDA-graph capture."""
    source = inspect.getsource(decode.mla_decode_out) + inspect.getsource(decode._launch)
    for forbidden in (".item()", ".tolist()", ".cpu()", ".any()", ".max()"):
        assert forbidden not in source
