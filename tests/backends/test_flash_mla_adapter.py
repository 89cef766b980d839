"""The adapter against stub packages of every generation of flash_mla; no GPU needed."""

import flash_mla_stubs as stubs
import pytest
import torch
from flash_mla_stubs import install_stub  # noqa: F401

import mla_ops
from mla_ops.backends import flash_mla, reference
from mla_ops.shapes import lse_strides
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.inputs import make_decode_inputs


def inputs_of(seqlen_q=1, heads=16, lengths=(0, 1, 65), **options):
    # Pages outside the pool are not flash_mla's to read, but the stub must not stumble either.
    return make_decode_inputs(lengths, seqlen_q=seqlen_q, num_heads_q=heads, **options)


def reference_of(inputs, attn_sink=None):
    q = inputs.q
    out = torch.empty((*q.shape[:3], 512), dtype=torch.float64)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float64)
    reference.mla_decode_out(
        *(q.double(), inputs.kv_cache.double(), *inputs[2:4], None, None, out, lse),
        softmax_scale=inputs.softmax_scale,
        causal=True,
        attn_sink=attn_sink,
    )
    return out, lse


def call(inputs, attn_sink=None, **replaced):
    inputs = inputs._replace(**replaced)
    metadata = mla_ops.mla_metadata(
        inputs.cache_seqlens, num_heads_q=inputs.q.shape[2], seqlen_q=inputs.q.shape[1]
    )
    return flash_mla.mla_decode(
        *(*inputs[:4], *metadata),
        softmax_scale=inputs.softmax_scale,
        causal=True,
        attn_sink=attn_sink,
    )


GENERATIONS = {
    "legacy": (stubs.LEGACY, "flash_mla"),
    "vllm": (stubs.VLLM, "vllm._flashmla_C"),
    "pybind": (stubs.PYBIND, "flash_mla.cuda"),
    "two_tensors": (stubs.TWO_TENSORS, "flash_mla"),
}


@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_gets_its_arguments(install, generation, seqlen_q):
    module = install(*GENERATIONS[generation])
    inputs = inputs_of(seqlen_q)
    out, lse = call(inputs)
    expected, expected_lse = reference_of(inputs)
    assert_close_to_fp64(out, expected)
    assert (lse[0] == torch.inf).all()
    assert_lse_close_to_fp64(torch.where(lse == torch.inf, -torch.inf, lse), expected_lse)
    assert lse.stride() == lse_strides(seqlen_q, 16)
    assert out.is_contiguous()
    q, kv, width, lengths, table, scale, causal, meta, splits, *extra = module.calls[0]
    for passed, given in zip((q, kv, table, lengths), inputs[:4], strict=True):
        assert passed.data_ptr() == given.data_ptr()
        assert passed.shape == given.shape
    assert (width, scale, causal) == (512, inputs.softmax_scale, True)
    assert extra == ([None] if generation == "vllm" else [])
    if generation == "two_tensors":
        # Its layouts are its own: what is passed is what it planned, for S * H rows of one head.
        assert (meta == 7).all()
        assert (splits == 7).all()
        planned_lengths, rows, heads_k = module.plans[0]
        assert torch.equal(planned_lengths, inputs.cache_seqlens)
        assert (rows, heads_k) == (16 * seqlen_q, 1)
    else:
        wanted = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16, seqlen_q=seqlen_q)
        assert torch.equal(meta, wanted.tile_scheduler_metadata)
        assert torch.equal(splits, wanted.num_splits)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_out_variant_writes_the_callers_tensors_with_minus_infinity(install, generation):
    install(*GENERATIONS[generation])
    inputs = inputs_of(2, lengths=(0, 1, 65))
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16, seqlen_q=2)
    memory = torch.full((3, 2, 20, 530), float("nan"), dtype=torch.bfloat16)
    out = memory[:, :, 2:18, 8:520]
    lse = torch.full((3, 16, 2), float("nan"))
    flash_mla.mla_decode_out(
        *(*inputs[:4], *metadata, out, lse),
        softmax_scale=inputs.softmax_scale,
        causal=True,
        attn_sink=None,
    )
    expected, expected_lse = reference_of(inputs)
    assert_close_to_fp64(out, expected)
    assert_lse_close_to_fp64(lse, expected_lse)
    assert (lse[0] == -torch.inf).all()
    # Query 0 of the sequence of one token sees nothing.
    assert (lse[1, :, 0] == -torch.inf).all()
    assert (out[0] == 0).all()
    out.fill_(float("nan"))
    assert memory.isnan().all(), "wrote outside the view it was given"


def test_sink_scales_out_and_leaves_lse(install):
    install(stubs.LEGACY)
    inputs = inputs_of(2)
    sink = torch.randn(16)
    sink[3], sink[4] = torch.inf, -torch.inf
    out, lse = call(inputs, attn_sink=sink)
    _, plain_lse = call(inputs)
    expected, expected_lse = reference_of(inputs)
    expected = (
        expected * torch.sigmoid(expected_lse.transpose(1, 2) - sink).nan_to_num(0)[..., None]
    )
    assert_close_to_fp64(out, expected)
    assert torch.equal(lse, plain_lse)
    assert (out[0] == 0).all()


def test_q_that_tma_cannot_read_is_copied_and_any_other_is_not(install):
    module = install(stubs.LEGACY)
    inputs = inputs_of()
    memory = torch.empty(3 * 16 * 577 + 1, dtype=torch.bfloat16)
    odd = memory[1:].view(3, 1, 16, 577)[..., :576].copy_(inputs.q)
    shifted = memory[1 : 1 + inputs.q.numel()].view(inputs.q.shape)
    for q in (odd, shifted):
        q.copy_(inputs.q)
        call(inputs, q=q)
        passed = module.calls[-1][0]
        assert torch.equal(passed, inputs.q)
        assert passed.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in passed.stride()[:3])
    projection = torch.randn(3, 1, 16 * 576 + 640, dtype=torch.bfloat16)
    fused = projection[..., 64 : 64 + 16 * 576].view(3, 1, 16, 576)
    call(inputs, q=fused)
    assert module.calls[-1][0].data_ptr() == fused.data_ptr()


def test_strides_that_are_never_walked_are_spelled_for_tma(install):
    module = install(stubs.LEGACY)
    inputs = inputs_of(lengths=(0, 1, 64), spare_columns=0)
    pages = inputs.kv_cache.shape[0]
    cache = inputs.kv_cache.as_strided((pages, 64, 1, 576), (64 * 576, 576, 1, 1))
    table = inputs.block_table.as_strided((3, 1), (1, 3))
    assert torch.equal(table, inputs.block_table)
    call(inputs, kv_cache=cache, block_table=table)
    (
        _,
        kv,
        *_,
    ) = module.calls[-1]
    assert kv.data_ptr() == cache.data_ptr()
    assert kv.stride(2) % 8 == 0
    assert module.calls[-1][4].stride(1) == 1


def test_what_it_cannot_read_is_refused_by_name(install):
    install(stubs.LEGACY)
    inputs = inputs_of()
    memory = torch.zeros(inputs.kv_cache.numel() + 1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="kv_cache must begin at a multiple of 16 bytes"):
        call(inputs, kv_cache=memory[1:].view(inputs.kv_cache.shape))
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16, num_sm_parts=16)
    with pytest.raises(ValueError, match=r"exactly 132 rows .* got 16"):
        flash_mla.mla_decode(
            *(*inputs[:4], *metadata), softmax_scale=0.1, causal=True, attn_sink=None
        )


def test_operator_refuses_with_every_reason(install):
    install({})
    inputs = inputs_of(dtype=torch.float32)
    with pytest.raises(mla_ops.BackendUnavailableError) as error:
        mla_ops.mla_decode(*inputs[:4], softmax_scale=0.1, backend="flash_mla")
    assert "tensors are on cpu" in str(error.value)
    assert "bfloat16 and float16" in str(error.value)
    report = mla_ops.backend_report(device="cpu")
    assert report.reasons["flash_mla"]


@pytest.mark.parametrize("given", [True, False])
def test_operator_runs_it_end_to_end(install, monkeypatch, given):
    module = install(stubs.LEGACY)
    monkeypatch.setattr(flash_mla, "unavailable", lambda device: [])
    inputs = inputs_of(lengths=(0, 1, 65, 200), spare_columns=0)
    # The table holds 256 tokens: without a schedule of the caller lengths are capped to it.
    if not given:
        inputs.cache_seqlens[3] = 100000
        inputs.kv_cache.nan_to_num_(0)
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16) if given else None
    out = torch.empty((4, 1, 16, 512), dtype=torch.bfloat16)
    lse = torch.empty((4, 16, 1))
    mla_ops.mla_decode(
        *(*inputs[:4], metadata),
        softmax_scale=inputs.softmax_scale,
        backend="flash_mla",
        out=out,
        lse=lse,
    )
    expected, expected_lse = reference_of(inputs)
    assert_close_to_fp64(out, expected)
    assert_lse_close_to_fp64(lse, expected_lse)
    assert int(module.calls[0][3].max()) == (200 if given else 256)
    result = mla_ops.mla_decode(
        *(*inputs[:4], metadata), softmax_scale=inputs.softmax_scale, backend="flash_mla"
    )
    assert torch.equal(result.out, out)
    assert result.lse.stride() == lse_strides(1, 16)


def test_operator_mends_what_the_package_cannot_take_whatever_came_before(install, monkeypatch):
    module = install(stubs.LEGACY)
    monkeypatch.setattr(flash_mla, "unavailable", lambda device: [])
    inputs = inputs_of()
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16)
    memory = torch.zeros(inputs.q.numel() + 8, dtype=torch.bfloat16)
    for at, mended in ((0, False), (3, True), (8, False)):
        q = memory[at : at + inputs.q.numel()].view(inputs.q.shape).copy_(inputs.q)
        result = mla_ops.mla_decode(
            *(q, *inputs[1:4], metadata), softmax_scale=0.1, backend="flash_mla"
        )
        assert (module.calls[-1][0].data_ptr() != q.data_ptr()) == mended
        assert torch.equal(module.calls[-1][0], inputs.q)
        assert result.lse.stride() == lse_strides(1, 16)
    sink = torch.full((16,), torch.inf)
    sunk = mla_ops.mla_decode(
        *(inputs.q, *inputs[1:4], metadata),
        softmax_scale=0.1,
        attn_sink=sink,
        backend="flash_mla",
    )
    assert (sunk.out == 0).all()
    few = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16, num_sm_parts=16)
    with pytest.raises(ValueError, match=r"exactly 132 rows .* got 16"):
        mla_ops.mla_decode(*(inputs.q, *inputs[1:4], few), softmax_scale=0.1, backend="flash_mla")


@pytest.mark.parametrize("given", [False, True], ids=["planned_here", "given_a_schedule"])
def test_nothing_to_read_never_reaches_the_package(install, monkeypatch, given):
    module = install(stubs.LEGACY)
    monkeypatch.setattr(flash_mla, "unavailable", lambda device: [])
    inputs = inputs_of()
    for changed in (
        inputs._replace(block_table=inputs.block_table[:, :0]),
        inputs._replace(kv_cache=inputs.kv_cache[:0]),
        inputs._replace(q=inputs.q[:, :0]),
        inputs._replace(
            q=inputs.q[:0],
            block_table=inputs.block_table[:0],
            cache_seqlens=inputs.cache_seqlens[:0],
        ),
    ):
        lengths = changed.cache_seqlens
        metadata = mla_ops.mla_metadata(lengths, num_heads_q=16) if given else None
        out, lse = mla_ops.mla_decode(
            *changed[:4], metadata, softmax_scale=0.1, backend="flash_mla"
        )
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    assert module.calls == []
