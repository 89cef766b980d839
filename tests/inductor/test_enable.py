"""The opt-in passes: one plan a step, a slice copied instead of the pool, copies reported."""

import re
import warnings

import pytest
import torch
from pools import make_pool, make_tokens

from mla_ops import MLAMetadataBuffers, append_kv_, inductor, mla_decode, mla_metadata
from mla_ops._torch_compile import caches_off
from mla_ops.diagnostics.measure import measuring
from mla_ops.inductor.report import PoolCopyWarning

LAYERS, HALF_A_POOL = 4, make_pool()[0].nbytes // 2


def measured(step, *make_arguments, **options):
    """Run eager and compiled on separate memory; compare all of it; return the Measurement."""
    ours, theirs = ([make() for make in make_arguments] for _ in range(2))
    with torch.no_grad(), measuring(HALF_A_POOL) as recorder:
        got = torch.compile(step, fullgraph=True, **options)(*ours)
        expected = step(*theirs)
    for mine, eager in zip((*got, *tensors(ours)), (*expected, *tensors(theirs)), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
    return recorder.result()


def tensors(arguments):
    for each in arguments:
        if isinstance(each, torch.nn.Module):
            yield from each.buffers()
        else:
            yield from [each] if isinstance(each, torch.Tensor) else each


def pool():
    return make_pool()[0].clone()


def slice_read_later(pool, tokens):
    older = pool[:2].clone()
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    return (older * 2,)


def slices_between_writes(pool, tokens):
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    first, last = pool[:2].clone(), pool[4].clone()
    append_kv_(pool, tokens.kv_c * 2, tokens.k_pe, tokens.slots)
    return first * 2, (last + 1).sum()


def whole_read_later(pool, tokens):
    older = pool.clone()
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    return (older.sin().sum(),)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("step", [slice_read_later, slices_between_writes])
def test_a_slice_that_outlives_a_write_is_copied_instead_of_the_pool(step, dynamic):
    assert measured(step, pool, make_tokens, dynamic=dynamic).clones
    with inductor.enable(strict=True, pool_bytes=HALF_A_POOL):
        assert measured(step, pool, make_tokens, dynamic=dynamic).clones == ()


def test_a_copy_of_the_whole_pool_is_reported_with_its_line():
    line = whole_read_later.__code__.co_firstlineno
    with inductor.enable(pool_bytes=HALF_A_POOL), pytest.warns(PoolCopyWarning) as seen:
        measured(whole_read_later, pool, make_tokens)
    found = re.findall(rf"{re.escape(__file__)}:(\d+)", str(seen[0].message))
    assert found
    assert all(line < int(number) <= line + 3 for number in found)
    with (
        inductor.enable(pool_bytes=HALF_A_POOL, strict=True),
        pytest.raises(Exception, match=rf"without copies .*{re.escape(__file__)}:\d+"),
    ):
        measured(whole_read_later, pool, make_tokens)


def test_small_buffers_and_steps_without_copies_are_not_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PoolCopyWarning)
        with inductor.enable():
            measured(whole_read_later, pool, make_tokens)
        with inductor.enable(pool_bytes=1):
            measured(lambda p, t: append_kv_(p, t.kv_c, t.k_pe, t.slots) or (), pool, make_tokens)


def test_strict_mode_is_not_answered_from_a_compile_cache(tmp_path, monkeypatch):
    """Symptom: what warned once compiled in silence, because its graph was in the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compiled():
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(whole_read_later, fullgraph=True)(pool(), make_tokens())

    with inductor.enable(pool_bytes=HALF_A_POOL), pytest.warns(PoolCopyWarning):
        compiled()
    with (
        inductor.enable(pool_bytes=HALF_A_POOL, strict=True),
        pytest.raises(Exception, match="at"),
    ):
        compiled()


def layers(write_lengths, *, in_place):
    """Make a step of four layers, each of which plans anew, appends and decodes."""

    def step(pools, buffers, tokens):
        outs = []
        for layer, pool in enumerate(pools.unbind(0)):
            if in_place:
                plan = buffers.update(tokens.lengths)
            else:
                plan = torch.ops.mla_ops.mla_metadata(
                    tokens.lengths, 2, 1, 1, None, None, None, "auto", "auto", None
                )
            append_kv_(pool, tokens.kv_c + layer, tokens.k_pe, tokens.slots)
            arguments = (tokens.q, pool, tokens.table, tokens.lengths, plan)
            outs.extend(mla_decode(*arguments, softmax_scale=0.1, head_dim_v=128))
            if write_lengths:
                tokens.lengths.add_(1)
        return outs

    return step


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "functional"])
@pytest.mark.parametrize("write_lengths", [False, True], ids=["same", "written"])
def test_metadata_in_each_of_four_layers(write_lengths, in_place):
    """One plan a step with the pass; as many as layers where the lengths are written between."""
    step = layers(write_lengths, in_place=in_place)
    name = "mla_ops.mla_metadata_out" if in_place else "mla_ops.mla_metadata"
    arguments = (
        lambda: make_pool()[:1].repeat(LAYERS, 1, 1, 1, 1),
        lambda: MLAMetadataBuffers(8, num_heads_q=2),
        make_tokens,
    )
    rest = {"mla_ops.append_kv_": LAYERS, "mla_ops.mla_decode": LAYERS}
    plain = measured(step, *arguments)
    assert plain.launches == {**rest, name: LAYERS}
    with inductor.enable(strict=True, pool_bytes=HALF_A_POOL):
        one = measured(step, *arguments)
    assert one.launches == {**rest, name: LAYERS if write_lengths else 1}
    assert plain.clones == one.clones == ()


@pytest.mark.parametrize("take", [lambda x: x[:3], lambda x: x.narrow(0, 1, 2)])
@pytest.mark.parametrize("write_lengths", [False, True], ids=["same", "written"])
def test_lengths_sliced_anew_in_each_layer_are_one_plan(take, write_lengths):
    """Symptom: four launches where each layer took the live rows of the lengths by itself."""

    def step(lengths):
        outs = []
        for layer in range(LAYERS):
            outs.append(mla_metadata(take(lengths), num_heads_q=2).num_splits + layer)
            if write_lengths:
                lengths.add_(64)
        return outs

    with inductor.enable():
        seen = measured(step, lambda: torch.tensor([5, 100, 4000, 9], dtype=torch.int32))
    assert seen.launches == {"mla_ops.mla_metadata": LAYERS if write_lengths else 1}


def test_equal_plans_that_are_both_returned_are_two():
    """Symptom: writing into one of two returned schedules changed the other."""

    def step(lengths):
        plans = [mla_metadata(lengths, num_heads_q=2) for _ in range(3)]
        return plans[0].num_splits, plans[1].num_splits, plans[2].num_splits + 1

    lengths = torch.tensor([5, 100, 4000, 9], dtype=torch.int32)
    expected = step(lengths)[1]
    with torch.no_grad(), inductor.enable(), measuring() as recorder:
        first, second, _ = torch.compile(step, fullgraph=True)(lengths)
        first.fill_(-1)
    assert torch.equal(second, expected)
    # The third goes nowhere but into a sum: it is one of the others.
    assert recorder.result().launches == {"mla_ops.mla_metadata": 2}


def test_passes_of_the_user_run_first_and_stay():
    import torch._inductor.config as config

    seen = []
    with config.patch(post_grad_custom_post_pass=lambda graph: seen.append(graph)), caches_off():
        with inductor.enable():
            measured(slice_read_later, pool, make_tokens)
        assert seen
