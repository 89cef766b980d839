"""The Gluon decode on a Hopper device against the float64 oracle, with hostile inputs."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_calls import BEYOND, RAGGED, block_of, check, config_of, oracle, problem, run

from mla_ops.testing.numerics import assert_close_to_fp64, assert_lse_close_to_fp64

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.mark.parametrize("heads", [1, 5, 16, 32, 63, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_heads(heads, dtype):
    check(*problem(RAGGED, heads=heads, dtype=dtype))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seqlen_q", [2, 4, 8])
@pytest.mark.parametrize("heads", [5, 16, 128])
def test_several_queries(seqlen_q, causal, heads):
    check(*problem(RAGGED, heads=heads, seqlen_q=seqlen_q), causal=causal)


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192])
@pytest.mark.parametrize(("rows", "row_tile"), [(16, 16), (64, 32), (128, 64)])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_page_sizes(seqlen_q, rows, row_tile, page_size, rope):
    call = problem(
        RAGGED, heads=rows // seqlen_q, seqlen_q=seqlen_q, page_size=page_size, rope=rope
    )
    assert block_of(call) == (row_tile, 8 if row_tile == 64 else 4)
    check(*call, causal=seqlen_q > 1)


# Lengths, queries and heads; what is compiled for them: row groups, the batch bucket, and how many
# parts the combine kernel merges in one pass.
COMBINED = [
    ([40000], 8, 128, (16, 1, 8)),
    ([4000], 4, 128, (8, 1, 16)),
    ([40000], 2, 128, (4, 1, 32)),
    ([40000], 1, 128, (2, 1, 64)),
    ([200000], 1, 64, (1, 1, 128)),
    ([30000, 12000], 1, 128, (2, 32, 32)),
    ([5000, 50000, 1, 17000], 1, 64, (1, 32, 32)),
    ([100000, 50000], 1, 64, (1, 32, 64)),
    ([7 * b % 300 for b in range(200)], 1, 64, (1, 1024, 4)),
    ([7 * b % 300 for b in range(1100)], 1, 64, (1, 4096, 4)),
]


@pytest.mark.parametrize(
    ("lengths", "seqlen_q", "heads", "compiled"),
    COMBINED,
    ids=[f"B{len(c[0])}-S{c[1]}-H{c[2]}-E{c[3][2]}" for c in COMBINED],
)
def test_parts_of_64_rows(lengths, seqlen_q, heads, compiled):
    call = problem(lengths, heads=heads, seqlen_q=seqlen_q)
    config = config_of(*call)
    assert (config.row_tile, config.decode_warps) == (64, 8)
    assert (config.row_groups, config.batch_bucket, config.combine_parts) == compiled
    check(*call, causal=True)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1024, 16383, 16384, 40000])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_one_sequence(length, heads):
    check(*problem([length], heads=heads))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("batch", [2, 3, 6])
def test_few_sequences_of_many_rows(batch, heads):
    check(*problem(RAGGED[-batch:], heads=heads))


@pytest.mark.parametrize(
    ("batch", "warps", "page_size"),
    [(33, 4, 64), (129, 4, 16), (1100, 8, 16), (1100, 8, 32), (1100, 8, 64)],
)
def test_many_sequences_of_32_rows(batch, warps, page_size):
    torch.manual_seed(batch)
    call = problem(torch.randint(0, 300, (batch,)).tolist(), heads=32, page_size=page_size)
    assert block_of(call) == (32, warps)
    check(*call)


@pytest.mark.parametrize("batch", [3, 33, 128, 129, 200, 1100])
@pytest.mark.parametrize("longest", [640, 5000])
def test_batches(batch, longest):
    torch.manual_seed(batch)
    lengths = torch.randint(0, longest if batch < 1000 else 300, (batch,)).tolist()
    check(*problem(lengths))


@pytest.mark.parametrize("batch", [2, 8, 32, 128, 132, 133])
@pytest.mark.parametrize("length", [64, 1024, 1031])
def test_equal_lengths(batch, length):
    check(*problem([length] * batch))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("length", range(1, 65, 7))
@pytest.mark.parametrize(("rows", "row_tile"), [(16, 16), (128, 32), (256, 64)])
def test_unused_slots_hold_anything(rows, row_tile, poison, length):
    call = problem([length, length + 64], heads=rows // 2, seqlen_q=2, poison=poison)
    assert block_of(call) == (row_tile, 8 if row_tile == 64 else 4)
    check(*call, causal=True)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "row_tile"), [(16, 16), (64, 32), (128, 64)])
@pytest.mark.parametrize("poison", [float("nan"), 0.0])
def test_pages_outside_the_pool_are_absent_keys(poison, heads, row_tile, page_size):
    call = problem(RAGGED, heads=heads, page_size=page_size, poison=poison)
    assert block_of(call) == (row_tile, 8 if row_tile == 64 else 4)
    q, kv_cache, table, lengths = call
    table[8, 3] = -5
    table[9, 10] = BEYOND
    table[9, 0] = -(2**31)
    table[11, 0] = kv_cache.shape[0]
    table[4] = -1
    check(q, kv_cache, table, lengths)


def test_lengths_beyond_the_table_are_clamped():
    q, kv_cache, table, lengths = problem([192] * 5, poison=0.0)
    table = table[:, :3]
    lengths.copy_(torch.tensor([193, 100000, 2**31 - 1, -1, -(2**31)]))
    check(q, kv_cache, table, lengths)


def test_sink():
    arguments = problem(RAGGED, seqlen_q=2)
    sink = torch.randn(16, device="cuda") * 4
    sink[3], sink[4] = float("inf"), -float("inf")
    check(*arguments, causal=True, attn_sink=sink)


@pytest.mark.parametrize("padding", [(64, 0), (0, 2), (8, 5)])
def test_padded_cache(padding):
    check(*problem(RAGGED, padding=padding))


def test_strided_q_table_and_out():
    q, kv_cache, table, lengths = problem(RAGGED, heads=48, seqlen_q=3)
    wide = torch.full((*table.shape[:1], 3 * table.shape[1]), BEYOND, device="cuda").int()
    wide[:, : table.shape[1]] = table
    backing = torch.full((12, 16, 3, 1025), float("nan"), dtype=q.dtype, device="cuda")
    out = backing.transpose(1, 2)[..., 1::2]
    arguments = (q[:, :, 7:39:2], kv_cache, wide[:, : table.shape[1]], lengths)
    check(*arguments, causal=True, out=out)
    assert backing[..., ::2].isnan().all()


@pytest.mark.parametrize(
    "lengths", [RAGGED, [4097], [40, 65, 0]], ids=["ragged", "split", "whole"]
)
@pytest.mark.parametrize("heads", [8, 16, 32, 63])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_float32_out_is_not_rounded(heads, lengths, dtype):
    """Only the weights are rounded to the dtype of q: at most 0.71 of the error with out's."""
    arguments = problem(lengths, heads=heads, seqlen_q=2, dtype=dtype)
    sink = torch.linspace(-2, 2, heads, device="cuda")
    backing = torch.full((len(lengths), heads, 2, 1025), float("nan"), device="cuda")
    wide = backing.transpose(1, 2)[..., 1::2]
    options = {"causal": True, "attn_sink": sink}
    expected, expected_lse = oracle(*arguments, **options)
    (low, low_lse), (out, lse) = (run(*arguments, **options, out=out) for out in (None, wide))
    assert_close_to_fp64(out, expected, dtype=dtype)
    assert_lse_close_to_fp64(lse, expected_lse)
    assert torch.equal(lse, low_lse)
    assert (out - expected).norm() < 0.75 * (low - expected).norm()
    assert backing[..., ::2].isnan().all()


def test_replays_with_other_lengths_and_tables():
    q, kv_cache, table, lengths = problem([4097] * 9)
    out, lse = run(q, kv_cache, table, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(q, kv_cache, table, lengths)
    generator = torch.Generator().manual_seed(0)
    kv_cache.nan_to_num_(0.25)
    for _ in range(20):
        lengths.copy_(torch.randint(0, 4098, (9,), generator=generator))
        table[:, :65] = table[:, torch.randperm(65, generator=generator).cuda()]
        q.normal_()
        graph.replay()
        expected, expected_lse = oracle(q, kv_cache, table, lengths)
        assert_close_to_fp64(out, expected)
        assert_lse_close_to_fp64(lse, expected_lse)


def test_first_launch_of_a_batch_bucket_needs_no_other_state():
    arguments = [problem([700 + batch] * batch) for batch in (1, 40, 2, 130)]
    expected = [run(*each) for each in arguments]
    for each, (out, lse) in zip(arguments[::-1], expected[::-1], strict=True):
        again, lse_again = run(*each)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


def test_back_to_back_calls_do_not_overtake_each_other():
    """A kernel launched early must not read what its predecessor has yet to write."""
    q, kv_cache, table, lengths = problem([1000, 64, 300])
    for _ in range(50):
        out, _ = run(q, kv_cache, table, lengths)
        q[..., :512].copy_(out)
    chained = q.clone()
    torch.manual_seed(0)
    q2, *_ = problem([1000, 64, 300])
    for _ in range(50):
        out, _ = run(q2, kv_cache, table, lengths)
        torch.cuda.synchronize()
        q2[..., :512].copy_(out)
        torch.cuda.synchronize()
    assert torch.equal(chained, q2)


def test_misaligned_cache_is_refused():
    q, kv_cache, table, lengths = problem([64])
    flat = torch.zeros(kv_cache.numel() + 1, dtype=q.dtype, device="cuda")[1:]
    with pytest.raises(ValueError, match="kv_cache must begin at a multiple of 16 bytes"):
        run(q, flat.view(kv_cache.shape), table, lengths)
