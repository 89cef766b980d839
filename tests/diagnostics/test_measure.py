"""What measure sees, each figure with a case in which it must not be zero."""

import textwrap

import pytest
import torch
import toy_ops
from toy_ops import POOL_BYTES, pool_rows_slots

from mla_ops.diagnostics import measure, measuring


def facts(fn, *args, **options):
    return measure(fn, *args, **{"steps": 2, "big_bytes": POOL_BYTES, **options})


def test_well_formed_step_is_one_graph_with_its_launches_and_no_copies():
    seen = facts(toy_ops.step, *pool_rows_slots(), steps=3)
    assert (seen.graphs, seen.breaks, seen.recompiles, seen.clones) == (1, (), (), ())
    assert seen.launches == {"mla_ops_test_toy.append_": 1, "mla_ops_test_toy.read": 1}
    assert len(seen.codes) == 1
    assert len(seen.outputs) == 3


def test_outputs_are_those_of_the_eager_function():
    ours, theirs = pool_rows_slots(), pool_rows_slots()
    theirs = (theirs[0], ours[1], theirs[2])
    (output,) = facts(toy_ops.step, *ours, steps=1).outputs
    assert torch.equal(output, toy_ops.step(*theirs))


@pytest.mark.parametrize("fn", toy_ops.COPYING, ids=lambda fn: fn.__name__)
def test_copy_of_the_pool_is_seen(fn):
    seen = facts(fn, *pool_rows_slots(), steps=1)
    assert seen.clones
    assert all(copy.bytes == POOL_BYTES for copy in seen.clones)


def test_copy_below_the_threshold_is_not_reported():
    seen = facts(toy_ops.clone, *pool_rows_slots(), steps=1, big_bytes=POOL_BYTES + 1)
    assert seen.clones == ()


def test_copy_that_inductor_fuses_away_is_not_reported():
    assert facts(toy_ops.fused_away, *pool_rows_slots(), steps=1).clones == ()


def test_copy_of_a_pool_with_dynamic_pages_is_seen():
    seen = facts(toy_ops.layout_change, *pool_rows_slots(), steps=1, dynamic=True)
    assert seen.clones
    assert all(copy.bytes == POOL_BYTES for copy in seen.clones)


def test_each_layer_counts_as_a_launch():
    def layers(pool, rows, slots):
        for _ in range(3):
            rows = toy_ops.step(pool, rows, slots)
        return rows

    seen = facts(layers, *pool_rows_slots(), steps=1)
    assert seen.launches == {"mla_ops_test_toy.append_": 3, "mla_ops_test_toy.read": 3}


def test_graph_break_tells_reason_and_line():
    def broken(pool, rows, slots):
        first = toy_ops.read(pool, rows)
        torch._dynamo.graph_break()
        return toy_ops.step(pool, first, slots)

    seen = facts(broken, *pool_rows_slots())
    assert seen.graphs == 2
    (entry,) = seen.breaks
    line = broken.__code__.co_firstlineno + 2
    assert entry.where.endswith(f"test_measure.py:{line}")
    assert "graph" in entry.reason.lower()
    # Both graphs run in a step.
    assert seen.launches == {"mla_ops_test_toy.append_": 1, "mla_ops_test_toy.read": 2}


def test_a_reset_inside_loses_no_event_and_says_what_it_lost():
    """Symptom: zero recordings of graphs that were replayed; torch forgets its callbacks, too."""
    with measuring() as outer, measuring(reset=False) as recorder:
        assert recorder.result().breaks == ()
        for sizes in ((3, 4), (5, 6)):
            torch._dynamo.reset()
            step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
            for size in sizes:
                step(torch.ones(size))
        seen = recorder.result()
    assert len(seen.recompiles) == len(outer.result().recompiles) == 2
    assert all("size mismatch" in recompile.guards[-1] for recompile in seen.recompiles)
    assert seen.breaks is None
    handler = torch._dynamo.callback.callback_handler
    assert "clear" not in vars(handler)
    assert handler.end_callbacks == []


def test_recompiles_tell_the_guard_that_failed():
    pool, _, _ = pool_rows_slots()

    def inputs(step):
        return pool, torch.randn(4 + step, 96), torch.arange(4 + step)

    seen = measure(toy_ops.step, inputs=inputs, steps=4, mode=None, dynamic=False)
    assert seen.graphs == 4
    assert len(seen.recompiles) == 3
    assert all("size mismatch" in recompile.guards[-1] for recompile in seen.recompiles)
    # Only the latest code of a frame runs now.
    assert seen.launches["mla_ops_test_toy.read"] == 1


def test_args_and_inputs_exclude_each_other():
    with pytest.raises(TypeError, match="args must be empty"):
        measure(toy_ops.step, 1, inputs=lambda step: ())


def test_code_is_seen_although_it_is_in_the_compile_cache():
    for _ in range(2):
        assert len(facts(toy_ops.step, *pool_rows_slots(), steps=1).codes) == 1


def test_settings_and_hooks_are_restored_and_composed(monkeypatch):
    import torch._inductor.config as config
    from torch._inductor.graph import GraphLowering

    theirs = []
    hook = theirs.append
    monkeypatch.setattr(GraphLowering, "save_output_code", hook)
    with config.patch(fx_graph_cache=True):
        seen = facts(toy_ops.step, *pool_rows_slots(), steps=1)
        assert config.fx_graph_cache is True
    assert theirs == list(seen.codes)
    assert GraphLowering.save_output_code is hook


def test_settings_are_restored_after_an_error():
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.save_output_code
    with pytest.raises(ZeroDivisionError), measuring():
        raise ZeroDivisionError
    assert GraphLowering.save_output_code is before


def test_nothing_compiled_is_no_graph_and_other_compilers_leave_copies_unknown():
    with measuring() as nothing:
        toy_ops.step(*pool_rows_slots())
    assert nothing.result().graphs == 0
    assert nothing.result().clones == ()
    with measuring() as other:
        torch.compile(toy_ops.step, backend="aot_eager")(*pool_rows_slots())
    assert other.result().graphs == 1
    assert other.result().clones is None
    assert other.result().launches is None


def test_skip_and_recording_are_counted():
    from torch._dynamo.callback import CallbackTrigger, callback_handler
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    with measuring() as recorder:
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs")
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"):
            pass
    seen = recorder.result()
    assert seen.skips == 1
    assert seen.reasons == ("skipping cudagraphs due to mutated inputs",)
    assert seen.recordings == 1


def test_cpu_graphs_are_neither_capturable_nor_skipped():
    seen = facts(toy_ops.step, *pool_rows_slots(), mode="reduce-overhead")
    assert (seen.capturable, seen.skips, seen.captured) == (0, 0, None)


def test_description_names_what_is_wrong():
    text = facts(toy_ops.clone, *pool_rows_slots(), steps=1).describe()
    assert f"big copies: 3\n  {POOL_BYTES} bytes: " in text
    assert "mla_ops_test_toy.append_ 1" in text


TRITON_MODULE = textwrap.dedent(
    """
    triton_poi_fused_clone_0 = async_compile.triton('triton_poi_fused_clone_0', '''
    @triton.jit
    def triton_poi_fused_clone_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
        pass
    ''', device_str='cuda')

    def partition_0(args):
        arg0_1, arg1_1 = args
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((64, s0, 8), (512, 8, 1), torch.bfloat16)
            stream0 = get_raw_stream(0)
            triton_poi_fused_clone_0.run(reinterpret_tensor(arg0_1, (9,), (1,), 0), buf0, COUNT, \
stream=stream0)
            buf1 = buf0; del buf0  # reuse
            torch.ops.mla_ops.append_kv_.default(buf1, arg1_1)
            buf2 = torch.ops.mla_ops.snapshot.default(buf1)
        return (buf1, buf2,)

    def partition_1(args):
        arg0_1, buf1 = args
        with torch.cuda._DeviceGuard(0):
            triton_poi_fused_clone_0.run(buf1, arg0_1, COUNT, stream=stream0)
        return ()

    class Runner:
        def call(self, args):
            return self.partitions[0](args)
    """
)


@pytest.mark.parametrize(("count", "copies"), [("4096 * s0", 3), ("64", 1)])
def test_triton_code_is_read_and_kernels_that_visit_few_elements_copy_nothing(count, copies):
    from mla_ops.diagnostics.copies import Size
    from mla_ops.diagnostics.generated_code import read_code

    size = 64 * 16 * 8 * 2
    facts = read_code(
        TRITON_MODULE.replace("COUNT", count), {"arg0_1": Size(size // 2, 2)}, {"s0": 16}, size
    )
    assert facts.launches == {"mla_ops.append_kv_": 1, "mla_ops.snapshot": 1}
    assert (facts.kernels, facts.partitions) == (2, 2)
    assert len(facts.copies) == copies
    assert (size, "mla_ops.snapshot(buf0)", ("buf0",)) in facts.copies


def test_text_that_is_no_generated_module_is_unknown():
    from mla_ops.diagnostics.generated_code import read_code

    assert read_code("#include <torch>", {}, {}, 1) is None
    assert read_code("x = 1", {}, {}, 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("fn", toy_ops.COPYING, ids=lambda fn: fn.__name__)
def test_copy_of_the_pool_is_seen_on_cuda(fn):
    tensors = [tensor.cuda() for tensor in pool_rows_slots()]
    assert facts(fn, *tensors, steps=1).clones


@pytest.mark.gpu
def test_step_on_static_buffers_is_recorded_and_replayed():
    pool, rows, slots = (tensor.cuda() for tensor in pool_rows_slots())
    torch._dynamo.mark_static_address(pool)
    seen = facts(toy_ops.step, pool, rows, slots, steps=4)
    assert (seen.capturable, seen.recordings, seen.skips) == (1, 1, 0)
    assert seen.replays >= 2
    assert seen.captured
    assert seen.clones == ()


@pytest.mark.gpu
def test_mutated_argument_at_a_changing_address_is_skipped_and_says_why():
    def inputs(step):
        pool, rows, slots = pool_rows_slots()
        return pool.cuda(), rows.cuda(), slots.cuda()

    seen = measure(toy_ops.step, inputs=inputs, steps=3)
    assert seen.skips >= 1
    assert seen.captured is False
    assert any("mutated" in reason for reason in seen.reasons)
