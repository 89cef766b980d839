"""Breaks that torch does not resume from: in loops, try, context managers, whole modules."""

import logging
import time
from pathlib import Path

import pytest
import torch
from faulty_models import ones
from torch import nn

from mla_ops import _torch_breaks, explain
from mla_ops.diagnostics import measure, measuring

WIDTH = 8
VALUE = "keep the value a tensor; do not call .item() on it"
LOGGERS = (torch._dynamo.symbolic_convert, torch._dynamo.convert_frame)


def line(mark):
    """Return "file:line" of the line of this file with a mark."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"# MARK {mark}"))
    return f"{__file__}:{found}"


def prints(x):
    for _ in range(3):
        x = x + 1
        print("halfway")  # MARK print
    return x


def reads_item(x):
    for _ in range(3):
        x = x + x.sum().item()  # MARK item
    return x


def breaks(x):
    left = 2
    while left:
        x = x + 1
        torch._dynamo.graph_break()  # MARK call
        left -= 1
    return x


def tries(x):
    try:
        return x + int(x.sum())  # MARK try
    except ValueError:
        return x


def goes_back(x):
    y = torch.sin(x)
    y = y + 1
    try:
        y = y * 2
        print("halfway")  # MARK back
    finally:
        y = y + 1
    return y


class Timer:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def times(x):
    with Timer():
        return x + time.time()  # MARK time


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:  # MARK branch
                x = x * 2
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.rnn(x * 2)[0]  # MARK rnn


def logs(x):
    for _ in range(2):
        logging.getLogger("a").info("halfway")  # MARK log
        x = x + 1
    return x


FAULTS = [
    (prints, "print", "print", "print outside the compiled function"),
    (reads_item, "item", "Tensor.item", VALUE),
    (breaks, "call", "torch._dynamo.graph_break", "remove the call"),
    (tries, "try", "Tensor.item", VALUE),
    (goes_back, "back", "print", "print outside the compiled function"),
    (times, "time", "time.time", "call time.time outside the compiled function"),
    (Layers, "branch", "if", "choose with torch.where or torch.cond"),
    (Recurrent, "rnn", "LSTM", "torch._dynamo.config.allow_rnn = True before the first call"),
]


@pytest.mark.parametrize(
    ("model", "mark", "operator", "fix"), FAULTS, ids=[each[1] for each in FAULTS]
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_each_is_told_with_its_line_and_fix(model, mark, operator, fix, capsys):
    """Symptom: graph breaks 0 and no line; beside any other graph nothing was said at all."""
    fn = model() if isinstance(model, type) else model
    x = ones(3, 1, WIDTH) if model is Recurrent else ones()
    seen = measure(fn, x, mode=None)
    assert [(each.where, each.resumed) for each in seen.breaks] == [(line(mark), False)]
    report = explain(fn, x)
    assert report.facts["graph_breaks"] == 1
    (found,) = report.findings
    assert (found.kind, found.where, found.operator) == ("graph_break", line(mark), operator)
    assert found.fix.startswith(fix)
    assert found.what.endswith("; torch leaves the rest of the function to Python")


def test_beside_a_graph(capsys):
    """Symptom: "nothing found" for a model one of whose functions ran uncompiled."""

    def step(x):
        x = x * 2
        torch._dynamo.graph_break()
        return prints(x) + 1

    report = explain(step, ones())
    assert report.facts["graphs"]
    assert line("print") in {each.where for each in report.findings}
    assert report.facts["graph_breaks"] == len(report.findings) == 2


def jumps(x):
    if x.sum() > 0:  # MARK jump
        return x * 2
    return x


def test_a_break_that_torch_resumes_from_below_a_loop_is_one_break():
    """The caller with the loop is left to Python, the function it calls becomes two graphs."""

    def loop(x):
        for _ in range(2):
            x = jumps(x)
        return x

    seen = measure(loop, ones(), mode=None)
    assert [(each.where, each.resumed) for each in seen.breaks] == [(line("jump"), False)]
    (found,) = explain(loop, ones()).findings
    assert (found.where, found.operator, found.count) == (line("jump"), "if", 1)
    seen = measure(jumps, ones(), mode=None)
    assert [(each.where, each.resumed) for each in seen.breaks] == [(line("jump"), True)]


def test_a_break_inside_of_pythons_library_has_the_users_line():
    """Symptom: the line of logging/__init__.py, which is not the user's to change."""
    (found,) = explain(logs, ones()).findings
    assert (found.kind, found.where) == ("graph_break", line("log"))


def test_a_module_of_torch_itself_has_no_line_of_the_user():
    """Symptom: a line of torch/_dynamo/external_utils.py, and two breaks for one."""
    lstm, x = nn.LSTM(WIDTH, WIDTH), ones(3, 1, WIDTH)
    (entry,) = measure(lstm, x, mode=None).breaks
    assert (entry.where, entry.resumed) == ("unknown line", False)
    (found,) = explain(lstm, x).findings
    assert (found.kind, found.where, found.operator) == ("graph_break", None, "LSTM")


def test_an_error_of_the_function_is_no_break():
    def fails(x):
        for _ in range(2):
            raise ZeroDivisionError

    with measuring() as recorder, pytest.raises(ZeroDivisionError):
        torch.compile(fails, backend="eager")(ones())
    assert recorder.result().breaks == ()
    with pytest.raises(ZeroDivisionError):
        explain(fails, ones())


def test_loops_without_a_break_are_clean():
    def step(x, layers):
        for layer in layers:
            try:
                x = layer(x)
            finally:
                x = x + 1
        return x

    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    assert measure(step, ones(), layers, mode=None).breaks == ()
    report = explain(step, ones(), layers)
    assert report.ok, str(report)


def test_torch_with_an_experimental_lstm_is_clean():
    with torch._dynamo.config.patch(allow_rnn=True):
        assert measure(Recurrent(), ones(3, 1, WIDTH), mode=None).breaks == ()


def test_neither_levels_nor_disabled_logging_hide_them_and_nothing_more_is_printed(capfd):
    before = [vars(module)["graph_break_log"] for module in LOGGERS]
    levels = [logger.level for logger in before]
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with measuring() as outer, measuring(reset=False) as recorder:
            torch.compile(breaks, backend="eager")(ones())
    finally:
        logging.disable(disabled)
    assert [each.where for each in recorder.result().breaks] == [line("call")]
    assert outer.result().breaks == recorder.result().breaks
    measure(breaks, ones(), mode=None)
    assert "Graph break" not in "".join(capfd.readouterr())
    assert [vars(module)["graph_break_log"] for module in LOGGERS] == before
    assert [logger.level for logger in before] == levels


def test_where_torch_has_no_such_log_the_number_is_unknown(monkeypatch):
    monkeypatch.setattr(_torch_breaks, "_LOGGER", "gone")
    assert measure(breaks, ones(), mode=None).breaks is None
    (found,) = explain(breaks, ones()).findings
    assert (found.kind, found.where) == ("graph_break", None)
    assert found.fix == "remove the call"
    assert [each.resumed for each in measure(jumps, ones(), mode=None).breaks] == [True]


def test_a_break_that_only_the_frame_tells():
    told = []
    with _torch_breaks.unresumed_breaks(lambda *found: told.append(found)) as known:
        assert known
        try:
            raise RuntimeError("no such guard")
        except RuntimeError:
            LOGGERS[1].graph_break_log.debug(
                'Graph break: torch.compile cannot resume, which results in a skip.\n  File "a", '
                "line 3, in f\n"
            )
        LOGGERS[0].graph_break_log.debug("100 % of something else")
    assert told == [("no such guard", [("a", 3)])]
