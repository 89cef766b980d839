"""Which recordings of CUDA graphs are missing, told from the calls; a GPU is played here."""

import dataclasses

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from mla_ops import _torch_compile
from mla_ops.diagnostics import measure, measuring
from mla_ops.diagnostics.warm_up import GraphCall, recordings_due

A, B = "0/0", "1/0"


@pytest.mark.parametrize(
    ("calls", "due"),
    [
        ([], ""),
        ([(0, A)], ""),
        ([(0, A), (1, A)], A),
        # Twice in the step of the warm-up: still a warm-up.
        ([(0, A), (0, A)], ""),
        ([(0, A), (0, A), (1, A)], A),
        # Whatever follows a warm-up warms up, too.
        ([(0, B), (1, A), (1, B)], ""),
        ([(0, B), (1, B), (1, A)], B),
        ([(0, A, 4), (1, A, 5)], ""),
        ([(0, A, 4), (1, A, 5), (2, A, 4)], A),
        # CUDA graphs were not asked for.
        ([(0, "2/0"), (1, "2/0")], ""),
        ([(0, "2/0"), (0, A), (1, "2/0"), (1, A)], A),
    ],
)
def test_a_recording_is_due_after_the_warm_up(calls, due):
    seen = [GraphCall(step, name, sizes) for step, name, *sizes in calls]
    seen = [call._replace(sizes=tuple(call.sizes)) for call in seen]
    assert recordings_due(seen, {A, B}) == ({due} if due else set())


@pytest.fixture
def gpu(monkeypatch):
    """Compile for the CPU and say it was for CUDA; recordings are told by the test."""
    describe = _torch_compile._describe
    monkeypatch.setattr(
        _torch_compile,
        "_describe",
        lambda code: describe(code)._replace(device_types=frozenset({"cuda"})),
    )


def record(*graphs):
    """Tell of a recording as torch does."""
    for name in graphs:
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, name):
            pass


def two_graphs(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y + 1


@pytest.mark.parametrize(
    ("recorded", "unrecorded"),
    [((), 2), ((A,), 1), ((A, A, A), 1), ((A, B), 0), (("None", A), None)],
    ids=str,
)
def test_a_graph_without_a_recording_is_counted(recorded, unrecorded, gpu):
    """Symptom: three recordings of one graph hid that the other was dropped."""

    def inputs(step):
        if step == 1:
            record(*recorded)
        return (torch.ones(3),)

    seen = measure(two_graphs, inputs=inputs)
    assert (seen.capturable, seen.recordings) == (2, len(recorded))
    assert (seen.warmed_up, seen.unrecorded) == (0, unrecorded)
    # The CPU's skips are no GPU's.
    assert dataclasses.replace(seen, skips=0).captured == (bool(recorded) and not unrecorded)


def test_a_graph_that_a_recompilation_replaced_only_warmed_up(gpu):
    def inputs(step):
        if step == 2:
            record("0/1")
        return (torch.ones(4 + min(step, 1)),)

    seen = measure(lambda x: x.sin() + 1, inputs=inputs, steps=4)
    assert (seen.capturable, seen.recordings) == (2, 1)
    assert (seen.warmed_up, seen.unrecorded) == (1, 0)


def test_without_the_calls_nothing_is_claimed(gpu):
    step = torch.compile(two_graphs, mode="reduce-overhead")
    with measuring() as recorder:
        for _ in range(3):
            step(torch.ones(3))
    seen = recorder.result()
    assert (seen.capturable, seen.warmed_up, seen.unrecorded) == (2, None, None)


def test_without_a_reset_what_was_compiled_before_serves():
    """Symptom: watching the calls would compile once more and report a recompile."""

    def step(x):
        return x.sin() + 1

    measure(step, torch.ones(3))
    torch.compile(step, mode="reduce-overhead")(torch.ones(3))
    seen = measure(step, torch.ones(3), reset=False)
    assert (seen.graphs, seen.recompiles) == (0, ())
    assert seen.unrecorded is None
