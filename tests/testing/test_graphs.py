"""Graph texts: what they show, that nothing runs, and that CUDA needs no GPU."""

import pytest
import torch
import toy_ops
from expecttest import assert_expected_inline
from torch import nn
from toy_ops import POOL_BYTES, pool_rows_slots

from mla_ops.testing import graph_text

DEVICES = [None, "cuda"]


@pytest.mark.parametrize("device", DEVICES)
def test_step_text(device):
    text = graph_text(toy_ops.step, *pool_rows_slots(), device=device, big_bytes=POOL_BYTES)
    assert_expected_inline(
        text,
        """\
mla_ops_test_toy.append_(pool=pool, rows=rows, slots=slots)
%2 = mla_ops_test_toy.read(pool=pool, q=rows)
big copies: 0""",
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fn", toy_ops.COPYING, ids=lambda fn: fn.__name__)
def test_copy_of_the_pool_is_counted(fn, device):
    text = graph_text(fn, *pool_rows_slots(), device=device, big_bytes=POOL_BYTES)
    assert not text.endswith("big copies: 0")


def test_forgotten_mutation_changes_the_text():
    """A schema without (a!) loses the call: the golden text must not survive that."""
    library = torch.library.Library("mla_ops_test_liar", "FRAGMENT")
    library.define("append_(Tensor pool, Tensor rows) -> ()")
    library.impl("append_", lambda pool, rows: None, "CompositeExplicitAutograd")
    torch.library.register_fake("mla_ops_test_liar::append_", lambda *_: None, lib=library)

    def step(pool, rows, slots):
        torch.ops.mla_ops_test_liar.append_(pool, rows)
        return toy_ops.read(pool, rows)

    assert "append_" not in graph_text(step, *pool_rows_slots())


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pool", torch.zeros(toy_ops.POOL_SHAPE))


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_modules_and_containers_are_named(device):
    def step(cache, state, *rest):
        toy_ops.append_(cache.pool.view(-1, 1, 1, 96), state["rows"], rest[0])
        result = toy_ops.read(cache.pool.narrow(0, 0, 8), state["rows"])
        return toy_ops.read(cache.pool, result + 1), result

    _, rows, slots = pool_rows_slots()
    text = graph_text(step, Cache(), {"rows": rows}, slots, device=device)
    assert_expected_inline(
        text,
        """\
mla_ops_test_toy.append_(pool=cache.pool, rows=state[rows], slots=rest[0])
%2 = mla_ops_test_toy.read(pool=cache.pool, q=state[rows])
%3 = mla_ops_test_toy.read(pool=cache.pool, q=<computed>)
big copies: 0""",
    )


def test_module_as_the_function():
    class Model(Cache):
        def forward(self, rows, slots):
            return toy_ops.step(self.pool, rows, slots)

    _, rows, slots = pool_rows_slots()
    assert "append_(pool=pool, rows=rows, slots=slots)" in graph_text(Model(), rows, slots)


@pytest.mark.parametrize("device", DEVICES)
def test_indexing_and_copies_trace_for_cuda_without_cuda(device):
    """A torch built without CUDA refuses these methods on fake CUDA tensors."""

    def step(pool, rows, slots):
        pool[0, ..., :3] = 1.0
        pool.view(-1, 96)[slots] = rows
        pool.narrow(0, 1, 1).copy_(pool[None, 2].contiguous())
        toy_ops.append_(pool[1:], rows[:2].clone(), slots[:2])
        return toy_ops.read(pool[None, 1, 2:5][..., 0, :], rows[slots])

    text = graph_text(step, *pool_rows_slots(), device=device)
    assert "%2 = mla_ops_test_toy.read(pool=" in text


def test_nothing_is_computed_or_written():
    args = pool_rows_slots()
    graph_text(toy_ops.step, *args)
    assert not args[0].any()
    with pytest.raises(ZeroDivisionError):
        graph_text(lambda pool: 1 / 0, args[0])
