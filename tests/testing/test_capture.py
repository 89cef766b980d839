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


@pytest.mark.gpu
def test_skip_on_cuda_fails_both():
    def step(pool, rows, slots):
        return toy_ops.step(pool, rows.cpu().cuda(), slots)

    args = [tensor.cuda() for tensor in pool_rows_slots()]
    with pytest.raises(AssertionError):
        assert_captured(step, *args)
