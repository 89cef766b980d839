"""python -m mla_ops explain: targets, exit statuses, and one-line messages with a fix."""

import json
import textwrap

import pytest
import torch
from schemas import assert_documented, assert_matches

from mla_ops.__main__ import main
from mla_ops.diagnostics.finding import KINDS, Finding
from mla_ops.diagnostics.report import ExplainReport, Facts

MODULE = textwrap.dedent(
    """
    import torch
    from torch import nn

    number = 3

    def clean():
        return nn.Linear(4, 4), (torch.ones(2, 4),)

    def step(x, *, kv):
        kv[0] = x
        return kv.sum()

    def faulty():
        return step, (torch.ones(4),), {"kv": torch.zeros(2, 4)}

    def each_step():
        return nn.ReLU(), lambda step: (torch.ones(2 + step),)

    def wrong():
        return 3, 4

    def wrong_names():
        return nn.ReLU(), (torch.ones(2),), {1: 2}

    def bare_step():
        return nn.ReLU(), lambda step: torch.ones(2)

    def no_step():
        return nn.ReLU(), lambda: (torch.ones(2),)

    def on_gpu():
        return nn.Linear(4, 4).cuda(), (torch.ones(2, 4),)

    def ill():
        raise RuntimeError("no such layer")

    def scaled(x, *, steps, mode, inputs):
        return x * steps if mode else inputs

    def names_of_ours():
        kwargs = {"steps": torch.tensor(2), "mode": True, "inputs": None}
        return scaled, (torch.ones(2),), kwargs

    class Made:
        @staticmethod
        def without_arguments():
            return lambda: torch.ones(3) * 2
    """
)


@pytest.fixture(autouse=True)
def target_module(tmp_path, monkeypatch):
    (tmp_path / "explained_models.py").write_text(MODULE)
    (tmp_path / "explained_broken.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)


def run(capsys, *arguments):
    status = main(["explain", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_clean_target(capsys):
    status, text, _ = run(capsys, "explained_models:clean", "--strict")
    assert (status, text.startswith("explain: nothing found; steps 3")) == (0, True)


def test_findings_fail_only_in_strict_mode(capsys):
    status, text, _ = run(capsys, "explained_models:faulty", "--json", "--steps", "2")
    assert status == 0
    body = json.loads(text)
    assert_documented(ExplainReport)
    assert_matches(body, ExplainReport)
    assert body["facts"]["steps"] == 2
    (found,) = body["findings"]
    assert (found["kind"], found["argument"]) == ("mutated_input", "kv")
    assert found["where"].endswith("explained_models.py:11")
    status, text, _ = run(capsys, "explained_models:faulty", "--strict")
    assert status == 1
    assert "mark_static_address(kv)" in text
    status, _, _ = run(capsys, "explained_models:faulty", "--strict", "--mode", "default")
    assert status == 0


def test_help_documents_the_json(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["explain", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert 'schema: "mla_ops.explain/1"' in text
    fields = [name for kind in (ExplainReport, Facts, Finding) for name in kind.__annotations__]
    for name in (*fields, *KINDS):
        assert f"    {name}: " in text


def test_arguments_of_each_step(capsys):
    _, text, _ = run(capsys, "explained_models:each_step", "--mode", "default", "--json")
    assert [found["kind"] for found in json.loads(text)["findings"]] == ["recompile_shape"]


def test_nested_name_and_function_alone(capsys):
    status, _, _ = run(capsys, "explained_models:Made.without_arguments", "--strict")
    assert status == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("explained_models", "package.module:factory, got 'explained_models' (write `def factory"),
        ("nope", "return model, (x,)` in nope.py, then explain nope:factory)"),
        ("my.nope:", "in my/nope.py, then explain my.nope:factory)"),
        (":clean", "in models.py, then explain models:factory)"),
        ("explained_nothing:f", "module 'explained_nothing' must be importable, found none (run"),
        ("explained_models.sub:f", "module 'explained_models.sub' must be importable"),
        ("explained_models:missing", "explained_models must have 'missing', it has Made, bare"),
        ("explained_models:missing", "(name a function of it that returns (fn, args))"),
        ("explained_models:number", "number must be a function without arguments, got int (write"),
        ("explained_models:step", "got one that needs arguments (write one that returns"),
        ("explained_models:number.real.x", "explained_models must have 'x', it has as_integer"),
        (".explained_models:clean", "target must be package.module:factory, got '.explained"),
        ("explained_models:wrong", "must return fn, (fn, args) or (fn, args, kwargs)"),
        ("explained_models:wrong_names", "kwargs a dict of names, got (ReLU, tuple, dict)"),
        ("explained_models:bare_step", "args(step) must return a tuple, got Tensor (return (x,))"),
        ("explained_models:no_step", "a function of the step's number, got a function of other"),
        ("explained_models:clean.", "target must be package.module:factory, got 'explained_mod"),
        ("explained_models.py:clean", "(write explained_models:clean, in the folder it begins"),
        ("./sub/models.py:clean", "got a file in './sub/models.py:clean' (write sub.models:clean"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(capsys, target, message):
    status, text, error = run(capsys, target)
    assert (status, text) == (2, "")
    assert error.startswith("explain: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_gpu_is_told_in_one_line(capsys, monkeypatch):
    """Symptom: a traceback out of torch.cuda for a factory that ends in .cuda()."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def no_gpu(*args):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.nn.Module, "cuda", no_gpu)
    status, text, error = run(capsys, "explained_models:on_gpu")
    assert (status, text, error.count("\n")) == (2, "", 1)
    assert "must make its model where torch finds no GPU, got 'Torch not compiled" in error
    assert "(make it on the CPU" in error
    with pytest.raises(RuntimeError, match="no such layer"):
        run(capsys, "explained_models:ill")


def test_keywords_of_the_model_that_explain_has_too(capsys):
    """Symptom: explain() got multiple values for keyword argument 'steps'."""
    status, _, _ = run(capsys, "explained_models:names_of_ours", "--strict")
    assert status == 0


def test_missing_import_of_the_target_is_its_own_error(capsys):
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        run(capsys, "explained_broken:f")


def test_steps_must_be_a_positive_number(capsys):
    for steps in ("0", "x"):
        with pytest.raises(SystemExit):
            run(capsys, "explained_models:clean", "--steps", steps)
        assert f"must be at least 1, got '{steps}'" in capsys.readouterr().err
