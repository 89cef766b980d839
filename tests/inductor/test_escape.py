"""What leaves a compiled step: a copy stays a copy, and the cache itself costs none."""

import pytest
import torch
from pools import make_pool, make_tokens
from torch._inductor.utils import run_and_get_code

from mla_ops import append_kv_
from mla_ops._torch_compile import caches_off
from mla_ops.inductor.parts import _reads


def compiled(step, *arguments):
    torch._dynamo.reset()
    with torch.inference_mode(), caches_off():
        return run_and_get_code(torch.compile(step, fullgraph=True), *arguments)


@pytest.mark.parametrize(
    "copy",
    [torch.clone, lambda x: x[:2].clone(), lambda x: x + 0, lambda x: torch.cat([x[1:]])],
    ids=["whole", "slice", "plus_zero", "cat"],
)
def test_a_returned_copy_is_memory_of_its_own(copy):
    """Symptom: the next step changed what the last one had returned."""
    pool, tokens = make_pool()[0].clone(), make_tokens()

    def step(pool, kv_c):
        append_kv_(pool, kv_c, tokens.k_pe, tokens.slots)
        return copy(pool)

    result, _ = compiled(step, pool, tokens.kv_c)
    expected = copy(pool)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    pool.fill_(7.0)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_cache_and_views_of_it_are_returned_without_a_copy():
    pool, tokens = make_pool()[0].clone(), make_tokens()

    def step(pool, kv_c):
        append_kv_(pool, kv_c, tokens.k_pe, tokens.slots)
        return pool, pool[:2], pool.view(-1)

    (whole, part, flat), (code, *_) = compiled(step, pool, tokens.kv_c)
    assert {whole.data_ptr(), part.data_ptr(), flat.data_ptr()} == {pool.data_ptr()}
    assert "mla_ops.snapshot" not in code
    assert "empty_strided" not in code.split("def call")[1].split("runner =")[0]


def test_two_caches_change_places():
    pools, tokens = list(make_pool().clone()), make_tokens()
    first, second = (pool.clone() for pool in pools)

    def step(pools, kv_c):
        a, b = pools
        append_kv_(a, kv_c, tokens.k_pe, tokens.slots)
        append_kv_(b, kv_c * 2, tokens.k_pe, tokens.slots)
        older = a.clone()
        a.copy_(b)
        b.copy_(older)

    compiled(step, pools, tokens.kv_c)
    step((first, second), tokens.kv_c)
    torch.testing.assert_close(pools, [first, second], rtol=0, atol=0)


@pytest.mark.parametrize(
    "compute",
    [lambda x: x * 2, lambda x: x.flip(0), lambda x: x.flip(0).flip(0)],
    ids=["mul", "flip", "flip_twice"],
)
def test_what_is_computed_of_a_cache_before_a_write_is_of_the_value_then(compute):
    """Symptom: ``other.copy_(kv * 2); append_kv_(kv, ...)`` copied what was appended, too."""
    pools, tokens = list(make_pool().clone()), make_tokens()
    first, second = (pool.clone() for pool in pools)

    def step(pools, kv_c):
        a, b = pools
        b.copy_(compute(a))
        append_kv_(a, kv_c, tokens.k_pe, tokens.slots)

    compiled(step, pools, tokens.kv_c)
    step((first, second), tokens.kv_c)
    torch.testing.assert_close(pools, [first, second], rtol=0, atol=0)


def first_three_to_the_next(pool):
    pool[1:4].copy_(pool[:3].clone())


def a_flipped_part_to_another(pool):
    view = pool[1:4]
    view.copy_(view.flip(0) * 2)


def by_index(pool):
    pool[torch.tensor([1, 2, 3])] = pool[:3] + 0


@pytest.mark.parametrize("move", [first_three_to_the_next, a_flipped_part_to_another, by_index])
@pytest.mark.parametrize("again", [False, True], ids=["once", "appended_again"])
def test_a_part_moved_within_a_cache_is_of_the_value_before(move, again):
    """Symptom: the loop that moved the part read what it had just written."""
    pool, tokens = make_pool()[0].clone(), make_tokens()
    expected = pool.clone()

    def step(pool, kv_c):
        append_kv_(pool, kv_c, tokens.k_pe, tokens.slots)
        move(pool)
        if again:
            append_kv_(pool, kv_c * 2, tokens.k_pe, tokens.slots)

    compiled(step, pool, tokens.kv_c)
    step(expected, tokens.kv_c)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0)


def test_what_a_value_is_computed_of_is_found_behind_any_number_of_nodes():
    """Symptom: RecursionError, one call a node; and a size was taken for a tensor."""
    graph = torch.fx.Graph()
    pool, other = graph.placeholder("pool"), graph.placeholder("other")
    pool.meta["val"] = other.meta["val"] = torch.empty(2)
    size = graph.call_function(torch.ops.aten.sym_size.int, (pool, 0))
    size.meta["val"] = 2
    value = other
    for _ in range(3000):
        value = graph.call_function(torch.ops.aten.mul.Tensor, (value, size))
        value.meta["val"] = torch.empty(2)
    assert _reads(value, other)
    assert not _reads(value, pool)


@pytest.mark.parametrize("again", [False, True], ids=["once", "appended_again"])
def test_a_cache_copied_to_one_that_overlaps_it(again):
    memory, tokens = make_pool().flatten(0, 1).clone(), make_tokens()
    twin = memory.clone()

    def step(pool, other, kv_c):
        append_kv_(pool, kv_c, tokens.k_pe, tokens.slots)
        other.copy_(pool.clone())
        if again:
            append_kv_(pool, kv_c * 2, tokens.k_pe, tokens.slots)

    for each, call in ((memory, lambda *args: compiled(step, *args)), (twin, step)):
        with torch.no_grad():
            call(each[:6], each[3:9], tokens.kv_c)
    torch.testing.assert_close(memory, twin, rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layers", [lambda p: p.unbind(0), lambda p: p.split(1)])
def test_a_layer_of_a_list_of_views_is_kept_between_writes(layers, dynamic):
    """Symptom: ``kvs.unbind(0)[1].clone()`` was of the next write."""
    pool, tokens = make_pool().clone(), make_tokens()
    expected = pool.clone()

    def step(pool, kv_c):
        layer = layers(pool)[1].view(pool.shape[1:])
        append_kv_(layer, kv_c, tokens.k_pe, tokens.slots)
        older = layer.clone()
        append_kv_(layer, kv_c * 2, tokens.k_pe, tokens.slots)
        return older

    torch._dynamo.reset()
    with torch.no_grad(), caches_off():
        older = torch.compile(step, fullgraph=True, dynamic=dynamic)(pool, tokens.kv_c)
    torch.testing.assert_close(older, step(expected, tokens.kv_c), rtol=0, atol=0)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0)
