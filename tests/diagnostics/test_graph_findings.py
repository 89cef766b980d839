"""What splits a CUDA graph, in graphs for a GPU that is not there; names and lines."""

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from mla_ops._torch import storage_id
from mla_ops._torch_graphs import CodeInput
from mla_ops.diagnostics.graph_findings import graph_findings
from mla_ops.diagnostics.holders import held_tensors
from mla_ops.diagnostics.lines import readable_name, user_line
from mla_ops.diagnostics.measure import CompiledGraph
from mla_ops.diagnostics.watch import WatchedGraph, WatchedInput

TRACE = '  File "/model.py", line {0}, in forward\n    y = x\n'


def on_gpu(build, **devices):
    """Build a graph of fake tensors on these devices and list (kind, argument, operator, line)."""
    graph, fake = fx.Graph(), FakeTensorMode()
    nodes = []
    for name, device in devices.items():
        node = graph.placeholder(name)
        with fake:
            node.meta["val"] = torch.empty((4,), device=device)
        nodes.append(node)

    def call(line, target, args, device):
        node = graph.call_function(target, args)
        with fake:
            node.meta["val"] = torch.empty((4,), device=device)
        node.meta["stack_trace"] = TRACE.format(line)
        return node

    graph.output((build(call, *nodes),))
    inputs = tuple(CodeInput(name, n, True, False) for n, name in enumerate(devices))
    names = tuple(
        WatchedInput(f"self.{name}", True, f"/model.py:{n}", None, None)
        for n, name in enumerate(devices)
    )
    compiled = CompiledGraph("0/0", "", None, None, True, True, graph, inputs)
    found = graph_findings(compiled, WatchedGraph("0/0", names, ()), 1 << 20)
    return [(each.kind, each.argument, each.operator, each.where) for each in found]


def test_cpu_argument():
    def build(call, x, scale):
        return call(7, torch.ops.aten.mul.Tensor, (x, scale), "cuda")

    assert on_gpu(build, x="cuda", scale="cpu") == [
        ("cpu_tensor", "self.scale", None, "/model.py:1")
    ]
    assert on_gpu(build, x="cuda", scale="cuda") == []


def test_copy_between_devices_and_work_on_the_cpu():
    def build(call, x):
        copied = call(7, torch.ops.aten._to_copy.default, (x,), "cpu")
        summed = call(8, torch.ops.aten.cumsum.default, (copied, 0), "cpu")
        return call(9, torch.ops.aten._to_copy.default, (summed,), "cuda")

    assert on_gpu(build, x="cuda") == [
        ("device_copy", "self.x", "aten._to_copy", "/model.py:7"),
        ("cpu_tensor", "self.x", "aten.cumsum", "/model.py:8"),
        ("device_copy", "self.x", "aten._to_copy", "/model.py:9"),
    ]


def test_held_tensors_have_the_names_of_the_code():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(2))
            self.history = [torch.zeros(1), {"last": torch.zeros(3)}]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Inner()])

        def forward(self):
            return captured

    captured = torch.zeros(5)
    outer = Outer()
    inner = outer.layers[0]
    found = held_tensors(outer)
    assert found[storage_id(inner.kv)] == "self.layers[0].kv"
    assert found[storage_id(inner.history[1]["last"])] == "self.layers[0].history[1]['last']"
    assert found[storage_id(captured)] == "captured"
    assert held_tensors(outer.forward)[storage_id(inner.kv)] == "self.layers[0].kv"


def test_lines_and_names_are_those_of_the_user():
    inside = f'  File "{torch.__file__}", line 3, in f\n'
    assert user_line(TRACE.format(7) + inside) == "/model.py:7"
    assert user_line(inside) == f"{torch.__file__}:3"
    assert user_line(None) is None
    spelled = "L['self']._modules['layers']._modules['0']._buffers['kv']"
    assert readable_name(spelled) == "self.layers[0].kv"
    assert readable_name("G['CACHES'][0]") == "CACHES[0]"
