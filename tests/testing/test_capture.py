"""Each assertion passes on a good step and fails, with the facts, on a bad one."""

import dataclasses

import pytest
import torch
import toy_ops
from toy_ops import POOL_BYTES, pool_rows_slots

from mla_ops.diagnostics import measure
from mla_ops.testing import (
    assert_captured,
    assert_no_cudagraph_skips,
    assert_no_pool_clones,
    assert_no_recompiles,
    capture,
)


def broken(pool, rows, slots):
    first = toy_ops.read(pool, rows)
    torch._dynamo.graph_break()
    return toy_ops.step(pool, first, slots)


def batches(sizes):
    pool, _, _ = pool_rows_slots()
    return [(pool, torch.randn(size, 96), torch.arange(size)) for size in sizes]


def test_good_step_passes_every_assertion():
    args = pool_rows_slots()
    assert assert_captured(toy_ops.step, *args).graphs == 1
    assert assert_no_pool_clones(toy_ops.step, *args, pool_bytes=POOL_BYTES).clones == ()
    assert assert_no_cudagraph_skips(toy_ops.step, *args).skips == 0
    seen = assert_no_recompiles(toy_ops.step, batches([4, 5, 7, 3]), allowed=1)
    assert len(seen.recompiles) == 1


def test_graph_break_fails_assert_captured_with_its_line():
    with pytest.raises(AssertionError, match=r"2 graphs, expected 1; graph breaks: 1(.|\n)*\.py:"):
        assert_captured(broken, *pool_rows_slots())


@pytest.mark.parametrize("fn", toy_ops.COPYING, ids=lambda fn: fn.__name__)
def test_copy_fails_assert_no_pool_clones_with_bytes_and_kernel(fn):
    with pytest.raises(AssertionError, match=f"{POOL_BYTES} bytes: cpp_fused"):
        assert_no_pool_clones(fn, *pool_rows_slots(), pool_bytes=POOL_BYTES)


def test_recompiles_fail_assert_no_recompiles_with_the_guard():
    with pytest.raises(AssertionError, match=r"1 recompiles, 0 allowed(.|\n)*size mismatch"):
        assert_no_recompiles(toy_ops.step, batches([4, 5, 6]))


def test_one_call_can_not_show_a_recompile():
    with pytest.raises(ValueError, match="at least 2 calls"):
        assert_no_recompiles(toy_ops.step, batches([4]))


@pytest.mark.parametrize("check", [assert_captured, assert_no_pool_clones])
def test_function_that_never_compiles_fails(check):
    with pytest.raises(AssertionError, match=r"0 graphs, expected 1|nothing was compiled"):
        check(lambda *_: 1, *pool_rows_slots())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skips": 1, "reasons": ("skipping cudagraphs due to x",)}, "CUDA graph skips: 1"),
        ({"skips": None}, "CUDA graph skips: None"),
        ({"recordings": 0, "replays": 0}, "dropped without a word"),
        ({"recordings": None}, "CUDA graph recordings: None"),
    ],
)
@pytest.mark.parametrize("check", [assert_captured, assert_no_cudagraph_skips])
def test_missing_cuda_graphs_fail(check, change, message, monkeypatch):
    """A GPU's measurement, altered: the CPU has no CUDA graphs to lose."""
    good = dataclasses.replace(
        measure(toy_ops.step, *pool_rows_slots()), capturable=1, recordings=1, replays=2, skips=0
    )
    monkeypatch.setattr(capture, "measure", lambda *_, **__: good)
    check(toy_ops.step)
    monkeypatch.setattr(capture, "measure", lambda *_, **__: dataclasses.replace(good, **change))
    with pytest.raises(AssertionError, match=message):
        check(toy_ops.step)


def test_unknown_copies_fail(monkeypatch):
    good = measure(toy_ops.step, *pool_rows_slots())
    unknown = dataclasses.replace(good, clones=None)
    monkeypatch.setattr(capture, "measure", lambda *_, **__: unknown)
    with pytest.raises(AssertionError, match="copies are unknown"):
        assert_no_pool_clones(toy_ops.step)


TWO_OF_THREE = {"capturable": 3, "recordings": 2}


@pytest.mark.parametrize(
    "change",
    [
        {**TWO_OF_THREE, "warmed_up": 0, "unrecorded": None},
        # Two recordings of one graph.
        {**TWO_OF_THREE, "warmed_up": 1, "unrecorded": 1},
        {**TWO_OF_THREE, "capturable": 2, "warmed_up": 0, "unrecorded": 1},
    ],
)
def test_one_graph_without_a_recording_fails(change, monkeypatch):
    """Symptom: one recorded graph was enough, however many others had been dropped."""
    facts = {"replays": 2, "skips": 0, **change}
    altered = dataclasses.replace(measure(toy_ops.step, *pool_rows_slots()), **facts)
    monkeypatch.setattr(capture, "measure", lambda *_, **__: altered)
    with pytest.raises(AssertionError, match=r"recordings: 2, none of 1 of the [23] graphs"):
        assert_no_cudagraph_skips(toy_ops.step)


@pytest.mark.parametrize(
    "change",
    [
        {"capturable": 2, "recordings": 2, "warmed_up": 0, "unrecorded": 0},
        # The second graph replaced the first after one step.
        {"capturable": 2, "recordings": 1, "warmed_up": 1, "unrecorded": 0},
        # Sizes or partitions: several recordings of a graph.
        {"capturable": 2, "recordings": 5, "warmed_up": 0, "unrecorded": 0},
        {"capturable": 1, "recordings": 5, "warmed_up": 0, "unrecorded": None},
        # The calls were not watched.
        {"capturable": 2, "recordings": 1, "warmed_up": None, "unrecorded": None},
    ],
)
def test_warm_ups_sizes_and_partitions_pass(change, monkeypatch):
    facts = {"replays": 2, "skips": 0, **change}
    altered = dataclasses.replace(measure(toy_ops.step, *pool_rows_slots()), **facts)
    monkeypatch.setattr(capture, "measure", lambda *_, **__: altered)
    assert assert_no_cudagraph_skips(toy_ops.step) is altered


def on_cuda(*tensors):
    return [tensor.cuda() for tensor in tensors or pool_rows_slots()]


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captured, assert_no_cudagraph_skips])
def test_a_bare_mutated_argument_on_cuda_fails_until_its_address_is_static(check):
    """Torch copies no input that a step writes: it leaves CUDA graphs out and says so."""
    pool, rows, slots = on_cuda()
    with pytest.raises(AssertionError, match=r"CUDA graph skips: [1-9](.|\n)*mutated inputs"):
        check(toy_ops.step, pool, rows, slots)
    torch._dynamo.mark_static_address(pool)
    assert check(toy_ops.step, pool, rows, slots).replays >= 1


@pytest.mark.gpu
def test_graphs_dropped_without_a_word_on_cuda_fail():
    """With this setting torch 2.11 drops both, the one with the static shape too."""

    def step(x, y):
        first = x.sin()
        torch._dynamo.graph_break()
        return first, y.sin() * 2

    def inputs(number):
        x, y = on_cuda(torch.ones(5), torch.ones(7))
        torch._dynamo.mark_dynamic(y, 0)
        return x, y

    dropped = {"triton.cudagraph_skip_dynamic_graphs": True}
    with (
        torch._inductor.config.patch(dropped),
        pytest.raises(AssertionError, match=r"recordings: 0 \(dropped without a word"),
    ):
        assert_no_cudagraph_skips(step, inputs=inputs)
    assert assert_no_cudagraph_skips(step, inputs=inputs).recordings == 2


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4, 5, 5, 5), (4, 5, 6, 5, 6, 5)])
def test_a_recompilation_and_several_sizes_on_cuda_pass(sizes):
    seen = assert_no_cudagraph_skips(
        lambda x: x.cumsum(0) * 2,
        inputs=lambda number: on_cuda(torch.ones(sizes[number])),
        steps=len(sizes),
    )
    assert (seen.capturable, seen.warmed_up, seen.unrecorded) == (2, 1, 0)
    assert seen.recordings == len(set(sizes)) - 1
