"""explain names each cause, its argument or operator, its line and a fix, and the fix mends it."""

import re

import faulty_models as models
import pytest
import torch
from faulty_models import WIDTH, line, ones
from torch import nn
from toy_ops import POOL_BYTES, pool_rows_slots

import mla_ops
from mla_ops import explain


def only(report, kind, mark, argument=None, operator=None):
    """Return the one finding after comparing what it says."""
    assert not report.ok
    (finding,) = report.findings
    assert (finding.kind, finding.where) == (kind, line(mark)), str(report)
    assert finding.argument == argument
    # Some operators have another name in another release of torch.
    assert finding.operator in (operator if isinstance(operator, tuple) else (operator,))
    assert finding.kind in str(report)
    assert finding.fix
    return finding


def assert_clean(report):
    assert report.ok, str(report)


def apply(finding, **names):
    """Run the call that the fix spells out, on the tensors of these names."""
    call = re.search(r"torch\._dynamo\.mark_\w+\([\w., ]+\)", finding.fix)
    exec(call[0], {"torch": torch, **names})


def test_graph_break(capsys):
    found = only(explain(models.breaks, ones()), "graph_break", "break", operator="print")
    assert "outside the compiled function" in found.fix
    assert_clean(explain(models.whole, ones()))


def test_item():
    report = explain(models.reads_item, ones())
    assert (
        "keep the value a tensor" in only(report, "graph_break", "item", None, "Tensor.item").fix
    )
    assert_clean(explain(models.keeps_tensor, ones()))


def test_recompile_by_float():
    factors = [0.5, 0.25, 0.125]
    report = explain(models.scaled, inputs=lambda step: (ones(), factors[step]))
    found = only(report, "recompile_value", "float", "factor")
    assert "factor == 0.5" in found.what
    assert "torch.tensor(factor)" in found.fix
    tensors = [torch.tensor(factor) for factor in factors]
    assert_clean(explain(models.scaled, inputs=lambda step: (ones(), tensors[step])))


def test_recompile_by_shape():
    tensors = [ones(size) for size in (3, 4, 5)]
    report = explain(models.doubled, inputs=lambda step: (tensors[step],), mode="default")
    found = only(report, "recompile_shape", "shape", "x")
    assert "expected 3, actual 4" in found.what
    for x in tensors:
        apply(found, x=x)
    assert_clean(explain(models.doubled, inputs=lambda step: (tensors[step],), mode="default"))


def test_recompile_by_global(monkeypatch):
    monkeypatch.setattr(models, "SCALE", 1.0)

    def inputs(step):
        models.SCALE = 1.0 + step
        return (ones(),)

    report = explain(models.scaled_by_global, inputs=inputs)
    found = only(report, "recompile_global", "global", "SCALE")
    assert "pass SCALE as an argument" in found.fix
    # The same value as an argument, a tensor.
    assert_clean(explain(models.scaled, inputs=lambda step: (ones(), torch.tensor(1.0 + step))))


def test_mutated_bare_argument():
    kv = torch.zeros(4, WIDTH)
    found = only(
        explain(models.writes_argument, ones(), kv), "mutated_input", "argument", "kv", "copy_"
    )
    apply(found, kv=kv)
    assert_clean(explain(models.writes_argument, ones(), kv))


def test_mutated_argument_matters_only_to_cuda_graphs():
    assert_clean(explain(models.writes_argument, ones(), torch.zeros(4, WIDTH), mode="default"))


def test_closure_cache():
    step, cache = models.closure_cache()
    found = only(explain(step, ones()), "mutated_input", "closure", "cache", "setitem")
    apply(found, cache=cache)
    assert_clean(explain(step, ones()))


def test_big_argument_is_copied_before_each_replay():
    kv = torch.zeros(4, WIDTH)
    size = kv.numel() * kv.element_size()
    report = explain(models.reads_argument, ones(), kv, big_bytes=size)
    found = only(report, "copied_input", "copied", "kv")
    assert found.bytes == size
    apply(found, kv=kv)
    assert_clean(explain(models.reads_argument, ones(), kv, big_bytes=size))


def test_unsafe_operator():
    operator = "mla_ops_test_toy.no_capture"
    report = explain(models.calls_unsafe, ones())
    assert "cudagraph_unsafe" in only(report, "unsafe_operator", "unsafe", "x", operator).fix
    assert_clean(explain(models.calls_safe, ones()))


def test_size_that_depends_on_values():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explain(models.sized_by_value, ones())
    found = only(report, "unbacked_size", "unbacked", "x", "aten.nonzero")
    assert "torch.where" in found.fix
    assert_clean(explain(models.masked, ones()))


def test_write_through_a_view_of_the_cache():
    _, rows, slots = pool_rows_slots()
    found = only(
        explain(models.StackedCaches(), rows, slots, big_bytes=POOL_BYTES),
        *("cache_copy", "view", "self.stack", "aten.index_put"),
    )
    assert found.bytes == POOL_BYTES
    assert "a tensor of its own" in found.fix
    assert_clean(explain(models.OwnCaches(), rows, slots, big_bytes=POOL_BYTES))


def test_older_value_of_a_written_buffer():
    _, rows, slots = pool_rows_slots()
    report = explain(models.OlderValue(), rows, slots, big_bytes=POOL_BYTES)
    found = only(report, "big_copy", "older", "self.cache", ("aten.mul", "aten.clone"))
    assert found.bytes == POOL_BYTES
    assert "before the write" in found.fix
    assert_clean(explain(models.OlderRows(), rows, slots, big_bytes=POOL_BYTES))


def test_undeclared_dtype_copy():
    x = ones(4, 1024)
    report = explain(models.Casting(torch.float32), x)
    casts = ("prims.convert_element_type", "aten._to_copy")
    found = only(report, "dtype_copy", "dtype", "self.weight", casts)
    assert found.bytes == 2 * 1024 * 1024
    assert "torch.bfloat16" in found.fix
    assert_clean(explain(models.Casting(torch.bfloat16), x))


def test_changed_address():
    model, kept = models.Offset(), []

    def replaced(step):
        model.offset = torch.full((WIDTH,), float(step))
        kept.append(model.offset)
        return (ones(),)

    report = explain(model, inputs=replaced)
    found = only(report, "changed_address", "address", "self.offset")
    assert found.count == 2
    assert "self.offset.copy_(value)" in found.fix

    def written(step):
        model.offset.copy_(torch.full((WIDTH,), float(step)))
        return (ones(),)

    assert_clean(explain(model, inputs=written))


def test_recording_for_each_size():
    def inputs(step):
        x = ones(3 + step)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    found = only(explain(models.summed, inputs=inputs), "rerecorded", "sizes", "x")
    assert "3, 4, 5" in found.what
    assert "pad" in found.fix
    padded = [nn.functional.pad(ones(3 + step), (0, 5 - step)) for step in range(3)]
    assert_clean(explain(models.summed, inputs=lambda step: (padded[step],)))


def test_a_break_that_leaves_no_graph_is_told():
    """Symptom: "nothing found" for a function that ran eagerly as a whole."""

    def caught(x):
        try:
            return x + int(x.sum())
        except ValueError:
            return x

    report = explain(caught, ones())
    assert report.facts["graphs"] == 0
    (found,) = report.findings
    assert (found.kind, found.operator) == ("graph_break", "Tensor.item")
    assert_clean(explain(lambda: 3))


def test_sizes_that_stay_for_two_steps_do_not_come_back():
    def inputs(step):
        x = ones(3 + step // 2)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    report = explain(models.summed, inputs=inputs, steps=5)
    assert "3, 4, 5" in only(report, "rerecorded", "sizes", "x").what


def test_output_read_after_it_is_overwritten():
    found = only(
        explain(models.Recurrent(), ones()), "overwritten_output", "overwritten", "self.state"
    )
    assert "self.state.copy_(value)" in found.fix
    assert_clean(explain(models.RecurrentInPlace(), ones()))


def test_output_that_something_keeps():
    found = only(explain(models.Keeping(), ones()), "kept_output", "kept", "self.last")
    assert "self.last.copy_(value)" in found.fix
    assert_clean(explain(models.KeepingInPlace(), ones()))


def test_metadata_in_every_layer():
    lengths = torch.tensor([3, 70], dtype=torch.int32)
    report = explain(models.MetadataPerLayer(), lengths)
    found = only(report, "metadata_launches", "metadata", operator="mla_ops.mla_metadata")
    assert report.facts["metadata_launches"] == 2
    assert "inductor.enable()" in found.fix
    with mla_ops.inductor.enable():
        assert_clean(explain(models.MetadataPerLayer(), lengths))
    assert_clean(explain(models.MetadataOnce(), lengths))


def test_errors_of_the_function_and_of_the_call():
    def fails(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        explain(fails, ones())
    with pytest.raises(TypeError, match="args must be empty"):
        explain(models.whole, ones(), inputs=lambda step: ())
    with pytest.raises(TypeError, match=r"inputs must return a tuple .* got Tensor"):
        explain(models.whole, inputs=lambda step: ones(1, WIDTH))
    with pytest.raises(ValueError, match="steps must be at least 1"):
        explain(models.whole, ones(), steps=0)


def test_a_failing_step_is_told_after_the_causes_found():
    def breaks_and_fails(x):
        torch._dynamo.graph_break()
        raise ValueError("no such row")

    kinds = {each.kind: each for each in explain(breaks_and_fails, torch.ones(3)).findings}
    assert set(kinds) == {"graph_break", "step_failed"}
    assert kinds["step_failed"].what == "a step ended with ValueError: no such row"


def test_a_failing_step_without_another_cause_raises():
    def fails(x, rows):
        return x + len(rows[3])

    with pytest.raises(IndexError):
        explain(fails, torch.ones(3), [1])
