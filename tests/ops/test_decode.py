"""mla_decode against a float64 oracle that shares no code with it, over hostile inputs."""

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import covering_rows

from mla_ops import mla_decode, mla_metadata
from mla_ops.shapes import lse_strides
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.inputs import make_decode_inputs

BACKENDS = ("cpu", "reference")
NAN, INF = float("nan"), float("inf")
LSE_ATOL = {torch.float64: 1e-5, torch.float32: 1e-5}
LENGTHS = {
    "padded": lambda s: (0, 1),
    "page": lambda s: (63, 64, 65),
    "early": lambda s: (s - 1, s),
    "ragged": lambda s: (7, 0, 130, 1),
    "one": lambda s: (33,),
}
AXES = {
    "backend": BACKENDS,
    "dims": ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32)),
    "num_heads_q": (1, 3, 5, 16, 20, 63, 128),
    "seqlen_q": (1, 2, 3, 4, 5, 6, 7, 8),
    "causal": (True, False),
    "page_size": (1, 16, 64, 128),
    "dtype": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "lengths": tuple(LENGTHS),
    "poison": (NAN, INF),
    "table_tail": (2147480000, -1),
    "spare_columns": (0, 1, 5),
    "strided_q": (False, True),
    "padded_rows": (False, True),
    "padded_pages": (False, True),
    "attn_sink": (False, True),
    "out": (None, "like q", "float32"),
    "lost_page": (None, -1, 10**6),
}
LAYOUT = (
    *("num_heads_q", "seqlen_q", "page_size", "dtype", "poison", "table_tail"),
    *("spare_columns", "strided_q", "padded_rows", "padded_pages"),
)
ROWS = covering_rows(AXES)


def case_id(row):
    latent, rope = row["dims"]
    dtype = str(row["dtype"]).removeprefix("torch.")
    sizes = f"S{row['seqlen_q']}-H{row['num_heads_q']}-P{row['page_size']}-{latent}+{rope}"
    return f"{row['backend']}-{sizes}-{dtype}-{row['lengths']}"


def empty_outputs(inputs, kind="like q"):
    """Return poisoned out and lse of strides that no backend would choose."""
    if kind is None:
        return None, None
    batch, seqlen_q, heads, _ = inputs.q.shape
    dtype = inputs.q.dtype
    if kind == "float32" and dtype != torch.float64:
        dtype = torch.float32
    out = torch.full((heads, batch, seqlen_q, inputs.head_dim_v + 3), NAN, dtype=dtype)
    lse = torch.full((seqlen_q, heads, batch, 2), NAN)
    return out[..., :-3].permute(1, 2, 0, 3), lse[..., 0].permute(2, 1, 0)


def check(inputs, backend, *, causal, attn_sink=None, out=None, lse=None, metadata=None):
    memory = [
        t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0) for t in inputs[:4]
    ]
    before = [m.clone() for m in memory]
    got = mla_decode(
        *inputs[:4],
        metadata,
        softmax_scale=inputs.softmax_scale,
        head_dim_v=inputs.head_dim_v,
        causal=causal,
        attn_sink=attn_sink,
        backend=backend,
        out=out,
        lse=lse,
    )
    expected, expected_lse = oracle.decode(*inputs, causal=causal, attn_sink=attn_sink)
    assert_close_to_fp64(got.out, expected)
    atol = LSE_ATOL.get(inputs.q.dtype, 1e-3)
    assert_lse_close_to_fp64(got.lse, expected_lse, atol=atol)
    for now, then in zip(memory, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.mark.parametrize("row", ROWS, ids=case_id)
def test_equals_the_oracle(row):
    latent_dim, rope_dim = row["dims"]
    inputs = make_decode_inputs(
        LENGTHS[row["lengths"]](row["seqlen_q"]),
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        **{name: row[name] for name in LAYOUT},
    )
    if row["lost_page"] is not None:
        inputs.block_table[-1, :1] = row["lost_page"]
    out, lse = empty_outputs(inputs, row["out"])
    attn_sink = torch.linspace(-2, 2, row["num_heads_q"]) if row["attn_sink"] else None
    got = check(
        inputs, row["backend"], causal=row["causal"], attn_sink=attn_sink, out=out, lse=lse
    )
    if row["out"]:
        assert got.out is out
        assert got.lse is lse
    else:
        assert got.out.is_contiguous()
        assert got.lse.stride() == lse_strides(row["seqlen_q"], row["num_heads_q"])


@pytest.mark.parametrize("name", AXES)
def test_every_value_meets_both_backends(name):
    """The list above is only worth its name if this holds."""
    seen = {(row["backend"], row[name]) for row in ROWS}
    if name != "backend":
        assert seen == {(backend, value) for backend in BACKENDS for value in AXES[name]}


@st.composite
def ragged(draw):
    page_size = draw(st.sampled_from((1, 2, 4, 16, 64)))
    lengths = draw(st.lists(st.integers(0, 70), min_size=0, max_size=5))
    inputs = make_decode_inputs(
        lengths,
        seqlen_q=draw(st.integers(0, 8)),
        num_heads_q=draw(st.integers(1, 5)),
        latent_dim=128,
        rope_dim=32,
        page_size=page_size,
        dtype=draw(st.sampled_from(AXES["dtype"])),
        poison=draw(st.sampled_from((NAN, INF, -INF))),
        table_tail=draw(st.sampled_from((2147480000, -1, -(2**31), 10**6))),
        spare_columns=draw(st.integers(0, 2)),
        spare_pages=draw(st.integers(0, 2)),
        strided_q=draw(st.booleans()),
        padded_rows=draw(st.booleans()),
        padded_pages=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
    table = inputs.block_table
    if table.numel() and draw(st.booleans()):
        row, column = draw(st.integers(0, table.shape[0] - 1)), draw(st.integers(0, 3))
        table[row, column % table.shape[1]] = draw(st.sampled_from((-1, 10**6, -(2**31))))
    if lengths and draw(st.booleans()):
        beyond = draw(st.sampled_from((-1, -(2**31), 2**31 - 1)))
        row = draw(st.integers(0, len(lengths) - 1))
        # Longer than the table: clamped. All of the row's table must then name readable keys.
        if beyond < 0 or inputs.kv_cache.shape[0] == 0:
            inputs.cache_seqlens[row] = beyond
        else:
            inputs.kv_cache.nan_to_num_(nan=0.5, posinf=0.5, neginf=0.5)
            inputs.cache_seqlens[row] = beyond
    return inputs


given_outs = st.sampled_from(AXES["out"])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(inputs=ragged(), causal=st.booleans(), sink=st.booleans(), given_out=given_outs)
def test_random_ragged_batches(backend, inputs, causal, sink, given_out):
    attn_sink = torch.linspace(-2, 2, inputs.q.shape[2]) if sink else None
    out, lse = empty_outputs(inputs, given_out)
    check(inputs, backend, causal=causal, attn_sink=attn_sink, out=out, lse=lse)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("given_out", AXES["out"], ids=str)
@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((), {}),
        ((3, 0), {"seqlen_q": 0}),
        ((0, 0), {"spare_columns": 0}),
        ((0, 0), {"spare_pages": 0}),
        ((0, 0), {"spare_pages": 0, "spare_columns": 0}),
    ],
    ids=["B0", "S0", "M0", "N0", "N0-M0"],
)
def test_empty_sizes(backend, given_out, lengths, sizes):
    inputs = make_decode_inputs(lengths, num_heads_q=3, **sizes)
    inputs.cache_seqlens.fill_(5)
    if lengths == (3, 0):
        inputs.cache_seqlens.copy_(torch.tensor(lengths))
    out, lse = empty_outputs(inputs, given_out)
    check(inputs, backend, causal=True, out=out, lse=lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("length", [13, 2**31 - 1, -1, -(2**31)])
def test_lengths_beyond_the_table_are_clamped(backend, causal, length):
    """As if the sequence ended with the table: the last query sees all, the first S - 1 less."""
    inputs = make_decode_inputs(
        (12, 5), seqlen_q=3, num_heads_q=2, page_size=4, spare_columns=0, dtype=torch.float32
    )
    inputs.cache_seqlens[0] = length
    got = check(inputs, backend, causal=causal)
    inputs.cache_seqlens[0] = 12 if length > 0 else 0
    clamped = check(inputs, backend, causal=causal)
    assert torch.equal(got.out, clamped.out)
    assert torch.equal(got.lse, clamped.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [-INF, 0.0, INF])
def test_sinks_at_the_ends(backend, sink):
    """A sink of -inf changes nothing, one of +inf takes all the weight; empty rows stay 0."""
    inputs = make_decode_inputs((0, 5), num_heads_q=3, dtype=torch.float32)
    plain, plain_lse = oracle.decode(*inputs)
    got = mla_decode(
        *inputs[:4],
        softmax_scale=inputs.softmax_scale,
        attn_sink=torch.full((3,), sink),
        backend=backend,
    )
    assert_lse_close_to_fp64(got.lse, plain_lse, atol=1e-5)
    share = torch.sigmoid(plain_lse - sink).transpose(1, 2)[..., None].nan_to_num(0.0)
    assert_close_to_fp64(got.out, plain * share)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [300.0, 1e-9], ids=["one key wins", "uniform"])
def test_extreme_logits_stay_finite(backend, scale):
    inputs = make_decode_inputs((65, 2), dtype=torch.float32, softmax_scale=scale)
    got = mla_decode(*inputs[:4], softmax_scale=scale, backend=backend)
    expected, expected_lse = oracle.decode(*inputs)
    # Logits of 10^4 carry their own rounding into the exponent.
    tolerance = 1e-2 if scale > 1 else 1e-5
    torch.testing.assert_close(got.out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_changes_no_value(backend):
    """Backends that plan on their own ignore the schedule, whatever lengths it was made for."""
    inputs = make_decode_inputs((0, 65, 3), num_heads_q=5)
    metadata = mla_metadata(inputs.cache_seqlens, num_heads_q=5)
    ours = check(inputs, backend, causal=True, metadata=metadata)
    other = check(inputs, backend, causal=True)
    assert torch.equal(ours.out, other.out)
    assert torch.equal(ours.lse, other.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_of_the_outputs_are_untouched(backend):
    inputs = make_decode_inputs((0, 65, 3), num_heads_q=5, dtype=torch.float32)
    memory, lse_memory = torch.full((5, 1, 7, 514), 7.0), torch.full((5, 7, 3), 7.0)
    out, lse = memory[1:4, :, 1:6, 1:513], lse_memory[1:4, 1:6, 1:2]
    check(inputs, backend, causal=True, out=out, lse=lse)
    out.fill_(7.0)
    lse.fill_(7.0)
    assert bool((memory == 7.0).all())
    assert bool((lse_memory == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_out_compiled(backend, dtype):
    """One graph; bit for bit what the eager call writes, which no 16-bit number could hold."""
    inputs = make_decode_inputs((0, 65, 1100), seqlen_q=2, num_heads_q=3, dtype=dtype)
    sink = torch.linspace(-2, 2, 3)

    def step(q, kv_cache, block_table, cache_seqlens):
        out = q.new_empty((*q.shape[:3], 512), dtype=torch.float32)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return mla_decode(
            *(q, kv_cache, block_table, cache_seqlens),
            softmax_scale=inputs.softmax_scale,
            attn_sink=sink,
            backend=backend,
            out=out,
            lse=lse,
        )

    eager = step(*inputs[:4])
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)(*inputs[:4])
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)
    assert_close_to_fp64(eager.out, oracle.decode(*inputs, attn_sink=sink)[0])
    rounded = eager.out.to(dtype)
    assert not torch.equal(rounded.float(), eager.out)
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_close_to_fp64(rounded, eager.out.double(), dtype=torch.float32)
