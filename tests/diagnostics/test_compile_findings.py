"""Breaks and recompilations of wrapped functions, nested modules and changing flags."""

import functools

import faulty_models as models
import pytest
import torch
from faulty_models import WIDTH, line, ones
from torch import nn

from mla_ops import explain
from mla_ops.diagnostics.compile_findings import compile_findings
from mla_ops.diagnostics.explain import explain_calls
from mla_ops.diagnostics.lines import argument_names
from mla_ops.diagnostics.measurement import GraphBreak, Measurement


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Callable:
    """An object that is called, no module."""

    def __call__(self, x, kv):
        return models.writes_argument(x, kv)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("wrap", [functools.partial, decorated, lambda function: Callable()])
def test_arguments_of_a_wrapped_function_have_their_own_names(wrap, by_name):
    """Symptom: mark_static_address(args[1]) was advised, which no code has."""
    kv = torch.zeros(4, WIDTH)
    args, kwargs = ((ones(),), {"kv": kv}) if by_name else ((ones(), kv), {})
    (found,) = explain(wrap(models.writes_argument), *args, **kwargs).findings
    assert (found.kind, found.argument, found.where) == ("mutated_input", "kv", line("argument"))
    assert "mark_static_address(kv)" in found.fix


def test_a_float_of_a_wrapped_function():
    fn = decorated(models.scaled)
    (found,) = explain(fn, inputs=lambda step: (ones(), 0.5 + step)).findings
    assert (found.kind, found.argument, found.where) == (
        *("recompile_value", "factor"),
        line("float"),
    )
    assert "factor == 0.5" in found.what


def test_names_that_the_signature_does_not_tell():
    assert argument_names(lambda args, x: x) == {"kwargs['args']": "args", "kwargs['x']": "x"}
    assert argument_names(nn.Linear(2, 2))["args[0]"] == "input"
    assert argument_names(nn.functional.linear) == {}


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.5

    def forward(self, x):
        self.scale *= 2
        return x * self.scale


class Inside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.blocks = nn.ModuleDict({"first": nn.Sequential(inner)})

    def forward(self, x):
        return self.blocks["first"](x)


def test_a_number_that_a_nested_module_changes_is_one_finding():
    """Symptom: a second finding on (2.0*self.blocks.first[0].scale), with no line."""
    (found,) = explain(Inside(Doubling()), ones()).findings
    assert (found.kind, found.argument) == ("recompile_value", "self.blocks.first[0].scale")
    assert found.count == 2
    assert "torch.tensor(self.blocks.first[0].scale)" in found.fix
    assert found.where.rpartition(":")[0] == __file__


def test_a_global_that_the_function_changes(monkeypatch):
    """Symptom: (1.0 + G) was called a number to make a tensor of."""
    monkeypatch.setattr(models, "SCALE", 1.0)

    class Counting(nn.Module):
        def forward(self, x):
            models.SCALE += 1
            return models.scaled_by_global(x)

    report = explain(Inside(Counting()), ones())
    assert {(each.kind, each.argument) for each in report.findings} <= {
        ("recompile_global", "models.SCALE"),
        ("recompile_global", "SCALE"),
    }
    assert not report.ok


@pytest.mark.parametrize(
    ("fn", "inputs", "argument"),
    [
        (lambda x, rows: sum(rows) + x, lambda step: (ones(), [ones()] * (step + 1)), "rows"),
        (lambda x, how: x * 2 if how == "a" else x, lambda step: (ones(), "abc"[step]), "how"),
        (lambda x, bias: x + (0 if bias is None else bias), None, "bias"),
        (lambda x, more: x + sum(more.values()), lambda step: (ones(), {step: ones()}), "more"),
    ],
)
def test_what_is_no_number_is_named_too(fn, inputs, argument):
    """Symptom: "make what the guard names the same", and len(rows) was to become a tensor."""
    report = explain(fn, inputs=inputs or (lambda step: (ones(), ones() if step else None)))
    assert {(each.kind, each.argument) for each in report.findings} == {
        ("recompile_other", argument)
    }
    assert f"{argument} the same" in report.findings[0].fix


def test_a_flag_of_a_nested_module():
    model = Inside(nn.Dropout())

    def inputs(step):
        model.train(step % 2 == 0)
        return (ones(),)

    (found,) = explain(model, inputs=inputs).findings
    assert (found.kind, found.argument) == ("recompile_other", "self.blocks.first[0].training")


def test_tolist():
    (found, *_) = explain(lambda x: x * len(x.tolist()), ones()).findings
    assert (found.kind, found.operator) == ("graph_break", "Tensor.tolist")
    assert "do not call .tolist()" in found.fix


def test_hints_for_those_who_work_on_torch_are_left_out():
    reason = "odd\n  Hint: It may be possible to write Dynamo tracing rules for this code."
    facts = dict.fromkeys(Measurement.__dataclass_fields__)
    measured = Measurement(**{**facts, "breaks": (GraphBreak(reason, "unknown line"),)})
    (found,) = compile_findings(measured, (), {}, cudagraphs=True)
    assert found.fix == "move the line out of the compiled function"


def test_arguments_that_do_not_fit():
    """Symptom: advice on torch.compiler.set_stance for a model called without its input."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        # There the call fails as it does without torch.compile.
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            explain(nn.Linear(4, 4))
        return
    found = {each.kind: each for each in explain(nn.Linear(4, 4)).findings}
    assert set(found) == {"graph_break", "step_failed"}
    assert "arguments that its signature has" in found["graph_break"].fix
    assert "missing 1 required positional argument" in found["step_failed"].what


def test_keyword_arguments_named_like_those_of_explain():
    def fn(x, *, steps, mode):
        return x * steps if mode == "a" else x

    kwargs = {"steps": torch.tensor(2), "mode": "a"}
    report = explain_calls(fn, lambda step: (ones(),), kwargs, steps=2, mode="default")
    assert report.ok, str(report)
    assert report.facts["steps"] == 2


def test_a_setting_of_torch_that_changes():
    def inputs(step):
        torch.set_default_dtype((torch.float32, torch.float64)[step])
        return (ones(),)

    try:
        (found,) = explain(models.whole, inputs=inputs, steps=2).findings
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.kind, found.argument) == ("recompile_other", None)
    assert found.fix == "set default_dtype of torch once, before the first step"
