"""Which static tensors moved: not those of layers that share one graph, but one of them may."""

import pytest
import torch
from faulty_models import ones
from torch import nn

from mla_ops import explain
from mla_ops.diagnostics.holders import held_addresses
from mla_ops.diagnostics.measure import CompiledGraph
from mla_ops.diagnostics.replay_findings import expected_recordings
from mla_ops.diagnostics.watch import Call, WatchedGraph

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.offset = torch.zeros(WIDTH)

    def forward(self, x):
        return self.linear(x) + self.offset


class Printing(Block):
    def forward(self, x):
        y = super().forward(x)
        print("halfway")
        return y


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.used = slice(None)

    def forward(self, x):
        for block in self.blocks[self.used]:
            x = block(x)
        return x


class Regional(Model):
    """Each block is compiled by itself."""

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        return super().forward(x)


def moved(report):
    return {each.argument: each for each in report.findings if each.kind == "changed_address"}


def test_layers_that_share_a_graph_stay_where_they_are(capsys):
    """Symptom: "self.linear.weight had 3 addresses", with advice that overwrites the weights."""
    report = explain(Regional(), ones())
    assert report.ok, str(report)
    assert report.facts["graphs"] == 1
    report = explain(Model(Printing), ones())
    assert [each.kind for each in report.findings] == ["graph_break"]


def test_layers_of_arguments_stay_where_they_are():
    report = explain(lambda model, x: model(x), Regional(), ones())
    assert not moved(report)


def test_layers_that_some_steps_leave_out_stay_where_they_are():
    model = Regional()

    def inputs(step):
        model.used = slice(step % 2, 3)
        return (ones(),)

    assert not moved(explain(model, inputs=inputs, steps=5))


@pytest.mark.parametrize("model_class", [Regional, Model])
def test_one_layer_that_moves_is_named(model_class):
    model, kept = model_class(), []

    def inputs(step):
        kept.append(model.blocks[1].offset)
        model.blocks[1].offset = torch.full((WIDTH,), float(step))
        return (ones(),)

    (found,) = explain(model, inputs=inputs).findings
    assert (found.kind, found.argument, found.count) == (
        "changed_address",
        "self.blocks[1].offset",
        2,
    )
    assert "had 3 addresses" in found.what
    assert "self.blocks[1].offset.copy_(value)" in found.fix


def test_two_buffers_by_turns_are_two_addresses():
    model = Block()
    model.both = [torch.zeros(WIDTH), torch.ones(WIDTH)]

    def inputs(step):
        model.offset = model.both[step % 2]
        return (ones(),)

    found = moved(explain(model, inputs=inputs, steps=4))
    assert list(found) == ["self.offset"]
    assert found["self.offset"].count == 1


def test_addresses_of_a_module_at_any_depth():
    model = Block()
    inner = model.linear
    for _ in range(9):
        model = nn.Sequential(model)
    held = held_addresses(model)
    assert held["self" + "[0]" * 9 + ".linear.weight"] == inner.weight.data_ptr()


def recordings(*calls):
    """Count what is expected of (step, size) calls of one graph, not cut into pieces."""
    watched = WatchedGraph("0/0", (), (), [Call(step, (), (size,)) for step, size in calls])
    graph = CompiledGraph("0/0", "", None, None, True, True, None, ())
    watcher = type("Watcher", (), {"graphs": {"0/0": watched}})
    return expected_recordings([graph], watcher)


def test_a_graph_that_layers_share_is_recorded_at_each_of_its_places():
    """Symptom: 3 CUDA graphs for 1 piece were called too many where 3 layers share a graph."""
    assert recordings((0, 4), (1, 4), (2, 4)) == (1, 1)
    assert recordings(*[(step, 4) for step in range(3) for _ in range(3)]) == (1, 3)
    assert recordings((0, 4), (0, 4), (0, 4)) == (0, 0)
    assert recordings((0, 4), (1, 5), (2, 4), (3, 6)) == (1, 1)
