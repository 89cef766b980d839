"""Plans are remembered by layout: no refusal may get lost on the second call."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_ops
from mla_ops.ops import _decode_plan, decode
from mla_ops.ops._decode_plan import forget_plans, plan_decode
from mla_ops.ops._selection import reasons_against
from mla_ops.testing.inputs import make_decode_inputs


@pytest.fixture(autouse=True)
def fresh():
    forget_plans()
    yield
    forget_plans()


def outputs(batch=3, heads=16):
    return torch.empty((batch, 1, heads, 512), dtype=torch.bfloat16), torch.empty(
        (batch, heads, 1)
    )


def call(inputs, out=None, lse=None, metadata=None, **options):
    return mla_ops.mla_decode(
        *inputs[:4], metadata, softmax_scale=inputs.softmax_scale, out=out, lse=lse, **options
    )


def misshapen(inputs):
    out, lse = outputs()
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16)
    odd = torch.empty((3, 33), dtype=torch.int32)
    rows, splits = metadata
    for change in (
        {"q": inputs.q.float()},
        {"q": inputs.q[:2]},
        {"q": inputs.q[..., :575]},
        {"q": inputs.q.mT.contiguous().mT},
        {"kv_cache": inputs.kv_cache.half()},
        {"kv_cache": inputs.kv_cache[:, :, :0]},
        {"block_table": inputs.block_table.long()},
        {"block_table": inputs.block_table.t().contiguous().t()},
        {"cache_seqlens": inputs.cache_seqlens.long()},
        {"cache_seqlens": odd[:, 0].copy_(inputs.cache_seqlens)},
    ):
        yield change, {}
    for options in (
        {"metadata": (rows, splits[:3])},
        {"metadata": (rows.long(), splits)},
        {"metadata": (rows[:, :7], splits)},
        {"metadata": (rows.t().contiguous().t(), splits)},
        {"metadata": (torch.cat((rows, rows)), splits)},
        {"attn_sink": torch.zeros(15)},
        {"attn_sink": torch.zeros(16, dtype=torch.float64)},
        {"attn_sink": torch.zeros(32)[::2]},
        {"head_dim_v": 500},
        {"descale_k": torch.ones(1)},
        {"backend": "gone"},
        {"backend": "flash_mla"},
        {"out": out.half(), "lse": lse},
        {"out": out[:2], "lse": lse},
        {"out": out, "lse": lse.mT},
        {"out": out, "lse": lse.double()},
        {"out": out[:, :, :1].expand(out.shape), "lse": lse},
    ):
        yield {}, options


def test_what_does_not_fit_is_refused_after_a_call_that_did():
    inputs = make_decode_inputs((0, 1, 65))
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16)
    sink = torch.zeros(16)
    for _ in range(2):
        call(inputs)
        call(inputs, metadata=metadata)
        call(inputs, *outputs())
        call(inputs, *outputs(), metadata=metadata, attn_sink=sink)
        for change, options in misshapen(inputs):
            with pytest.raises((ValueError, TypeError, mla_ops.BackendUnavailableError)):
                call(inputs._replace(**change), **options)


def test_overlap_is_seen_although_the_layout_is_known():
    """A plan knows no addresses: without the comparison out would overwrite what is read."""
    inputs = make_decode_inputs((0, 1, 65), dtype=torch.float32)
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16)
    sink = torch.zeros(16)
    memory = torch.zeros(2_000_000, dtype=torch.float32)

    def placed(tensor, at):
        view = memory[at : at + tensor.numel()].view(tensor.dtype).view(tensor.shape)
        return view.copy_(tensor)

    def step(at_out, at_lse, rows=metadata.tile_scheduler_metadata, **options):
        out, lse = (
            placed(torch.empty((3, 1, 16, 512)), at_out),
            placed(torch.empty(3, 16, 1), at_lse),
        )
        call(changed, out, lse, metadata=(rows, metadata.num_splits), **options)

    size = 3 * 16 * 512
    q = placed(inputs.q, 100_000)
    cache = placed(inputs.kv_cache, 300_000)
    table = placed(inputs.block_table, 800_000)
    lengths = placed(inputs.cache_seqlens, 810_000)
    rows = placed(metadata.tile_scheduler_metadata, 820_000)
    changed = inputs._replace(q=q, kv_cache=cache, block_table=table, cache_seqlens=lengths)
    for options in ({}, {"attn_sink": sink}):
        step(0, size, rows, **options)
        step(1_000_000, 1_500_000, rows, **options)
        for at in (
            100_000 - size + 1,
            100_000,
            300_000 + cache.numel() - 1,
            800_000,
            810_002,
            820_001,
        ):
            backup = memory.clone()
            with pytest.raises(ValueError, match="memory of its own"):
                step(at, 1_500_000, rows, **options)
            memory.copy_(backup)
            with pytest.raises(ValueError, match="memory of its own"):
                step(1_000_000, max(at, 100_000), rows, **options)
            memory.copy_(backup)
        with pytest.raises(ValueError, match="memory of its own"):
            step(1_000_000, 1_000_000 + size - 1, rows, **options)
        # Neighbours are no overlap.
        step(100_000 - size, 100_000 + q.numel(), rows, **options)


def test_plans_are_per_layout_and_bounded(monkeypatch):
    monkeypatch.setattr(_decode_plan, "_MOST_PLANS", 3)
    for batch in (1, 2, 3, 1, 2, 3, 4, 5):
        inputs = make_decode_inputs((5,) * batch)
        out, _ = call(inputs)
        assert out.shape[0] == batch
        assert len(_decode_plan._plans) <= 3


def test_an_equal_layout_reuses_the_plan():
    first, second = make_decode_inputs((0, 1, 65)), make_decode_inputs((0, 2, 66), seed=1)
    arguments = (None, None, 0.1, 512, True, None, None, None, "auto")
    plan = plan_decode((*first[:4], *arguments))
    assert plan_decode((*second[:4], *arguments)) is plan
    assert plan_decode((*first[:4], *arguments[:-1], "reference")) is not plan


def test_the_address_of_a_cache_is_part_of_its_layout():
    """Symptom: auto named a backend that reads by TMA, and the call raised."""
    inputs = make_decode_inputs((0, 1, 65))
    memory = torch.zeros(inputs.kv_cache.numel() + 8, dtype=inputs.kv_cache.dtype)
    plans = [
        plan_decode(
            (
                *(inputs.q, memory[at : at + inputs.kv_cache.numel()].view_as(inputs.kv_cache)),
                *(inputs.block_table, inputs.cache_seqlens, None, None, 0.1, 512, True),
                *(None, None, None, "auto"),
            )
        )
        for at in (0, 3, 8)
    ]
    assert [plan.shape.aligned_cache for plan in plans] == [True, False, True]
    misaligned = plans[1].shape._replace(device=torch.device("cuda"))
    for backend, refused in (("flash_mla", True), ("gluon", True), ("triton", False)):
        reasons = reasons_against(backend, misaligned, probe=False)
        assert any("multiple of 16 bytes" in reason for reason in reasons) == refused


@pytest.mark.parametrize("wide", ["q", "out", "lse"])
def test_the_extent_of_a_sequence_is_part_of_its_shape(wide):
    """Symptom: offsets of 32 bits wrapped in the Gluon kernel, which read elsewhere."""
    with FakeTensorMode():
        inputs = make_decode_inputs((1, 1))
        tensors = dict(zip(("out", "lse"), outputs(batch=2), strict=True), q=inputs.q)
        sizes, far = tensors[wide].shape, 2**28
        strides = [{2: 1024, 16: far}.get(size, 1) for size in sizes]  # B, H, others
        tensors[wide] = torch.empty_strided(sizes, strides, dtype=tensors[wide].dtype)
        given = (None, None, 0.1, 512, True, None, None, None, "auto")
        arguments = (tensors["q"], *inputs[1:4], *given, tensors["out"], tensors["lse"])
        _, shape = _decode_plan.check_layout(arguments, traced=True)
    assert shape.sequence_span >= 15 * far > 2**31
    shape = shape._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
    for backend, refused in (("gluon", True), ("triton", False)):
        reasons = reasons_against(backend, shape, probe=False)
        assert any("within 2**31 elements" in reason for reason in reasons) == refused


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_layout_met_again_and_again_is_told_from_every_other(monkeypatch, scheduled):
    """The fourth call in a row takes the short cut; nothing that differs may take it, too."""
    planned = []
    plan = decode.plan_decode
    monkeypatch.setattr(decode, "plan_decode", lambda args: planned.append(args) or plan(args))
    inputs = make_decode_inputs((0, 1, 65))
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16)
    schedule = metadata if scheduled else (None, None)
    arguments = [*inputs[:4], *schedule, 0.1, 512, True, None, None, None, "auto"]
    memory = torch.zeros(inputs.kv_cache.numel() + 3, dtype=inputs.kv_cache.dtype)
    changes = [
        (0, inputs.q[:, :, :8]),
        (0, inputs.q.transpose(0, 1).contiguous().transpose(0, 1)[:, :1, :9]),
        (1, inputs.kv_cache[:-1]),
        (1, memory[3:].view(inputs.kv_cache.shape)),
        (2, inputs.block_table[:, :1]),
        (9, torch.zeros(16)),
        (12, "reference"),
    ]
    refused = [
        (0, inputs.q.half()),
        (2, inputs.block_table.long()),
        (3, inputs.cache_seqlens.long()),
        (5, metadata.num_splits[:-1]),
        (7, 500),
        (10, torch.ones(1)),
    ]
    if scheduled:
        changes.append((4, metadata.tile_scheduler_metadata[:8]))
    else:
        refused.append((4, metadata.tile_scheduler_metadata))
    operator = torch.ops.mla_ops.mla_decode.default
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            forget_plans()
            for number, (position, other) in enumerate(changes + refused):
                for _ in range(4):
                    operator(*arguments)
                planned.clear()
                operator(*arguments)
                assert not planned
                changed = [*arguments]
                changed[position] = other
                with contextlib.ExitStack() as stack:
                    if number >= len(changes):
                        errors = (ValueError, TypeError, NotImplementedError)
                        stack.enter_context(pytest.raises(errors))
                    operator(*changed)
                assert planned


def test_plans_need_no_private_name_of_torch(monkeypatch):
    monkeypatch.setattr(_decode_plan, "layout_guard", lambda tensors: None)
    inputs = make_decode_inputs((0, 1, 65))
    arguments = (*inputs[:4], None, None, 0.1, 512, True, None, None, None, "auto")
    forget_plans()
    plans = [plan_decode(arguments) for _ in range(4)]
    assert all(plan is plans[0] for plan in plans)
