"""explain where CUDA graphs are: recordings and replays counted, skips and splits explained."""

import re

import hopper
import pytest
import torch
from torch import nn

import mla_ops
from mla_ops import explain
from mla_ops.cli.model import DemoModel, demo_config, read_prompts

pytestmark = pytest.mark.gpu

WIDTH = 64
LIBRARY = torch.library.Library("mla_ops_test_explain", "FRAGMENT")
LIBRARY.define("no_capture(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("no_capture", lambda x: x + 1, "CompositeExplicitAutograd")
torch.library.register_fake("mla_ops_test_explain::no_capture", torch.empty_like, lib=LIBRARY)


def line(mark):
    """Return "file:line" of the line with a mark."""
    with open(__file__) as file:
        found = [n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# MARK {mark}")]
    assert len(found) == 1, mark
    return f"{__file__}:{found[0]}"


def ones(*shape):
    return torch.ones(shape or WIDTH, device="cuda")


def finding(report, kind):
    """Return the one finding of a kind."""
    found = [each for each in report.findings if each.kind == kind]
    assert len(found) == 1, str(report)
    return found[0]


def assert_clean(report, recorded=1):
    assert report.ok, str(report)
    facts = report.facts
    assert (facts["cudagraphs_recorded"], facts["cudagraphs_skipped"]) == (recorded, 0)
    assert facts["cudagraphs_replayed"] >= 1
    assert facts["cudagraphs_rerecorded"] == 0


def test_mlp_is_clean():
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)).cuda()
    assert_clean(explain(mlp, inputs=lambda step: (torch.randn(4, WIDTH, device="cuda"),)))


def test_decode_step_is_clean():
    sizes = {"num_layers": 2, "batch_size": 4, "max_seq_len": 256}
    model = DemoModel(demo_config("small"), dtype=torch.bfloat16, device="cuda", **sizes)
    model.prefill(read_prompts(4))
    report = explain(model)
    assert_clean(report)
    assert report.facts["metadata_launches"] == 1


@pytest.mark.sm90
def test_decode_layers_over_flash_mla_are_clean(flash_mla):
    model = hopper.Layers(3, 4, 256, backend=flash_mla)
    model.set_lengths([0, 1, 63, 200])
    assert_clean(explain(model, *model.tokens()))


def writes_argument(x, kv):
    kv[1].copy_(x)  # MARK argument
    return kv.sum(0)


def test_mutated_argument_is_skipped():
    kv = torch.zeros(4, WIDTH, device="cuda")
    report = explain(writes_argument, ones(), kv)
    found = finding(report, "mutated_input")
    assert (found.where, found.argument, found.operator) == (line("argument"), "kv", "copy_")
    assert report.facts["cudagraphs_skipped"] >= 1
    assert report.facts["cudagraphs_recorded"] == 0
    call = re.search(r"torch\._dynamo\.mark_static_address\(kv\)", found.fix)
    exec(call[0], {"torch": torch, "kv": kv})
    assert_clean(explain(writes_argument, ones(), kv))


def closure_cache(cache):
    def step(x):
        cache[1] = x  # MARK closure
        return cache * 2

    return step


def test_closure_cache_is_skipped():
    cache = torch.zeros(4, WIDTH, device="cuda")
    report = explain(closure_cache(cache), ones())
    found = finding(report, "mutated_input")
    assert (found.where, found.argument) == (line("closure"), "cache")
    torch._dynamo.mark_static_address(cache)
    assert_clean(explain(closure_cache(cache), ones()))


class Scaled(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0, device=device))

    def forward(self, x):
        return (x * self.scale).relu()  # MARK cpu


def test_cpu_tensor_splits_the_graph():
    report = explain(Scaled("cpu"), ones())
    found = finding(report, "cpu_tensor")
    assert (found.where, found.argument) == (line("cpu"), "self.scale")
    assert "self.scale = self.scale.cuda()" in found.fix
    assert_clean(explain(Scaled("cuda"), ones()))


def sums_on_the_cpu(x):
    total = (x * 2).cpu()  # MARK device
    return x + 1, total.cumsum(0)


def sums_on_the_gpu(x):
    return x + 1, (x * 2).cumsum(0)


def test_copy_to_the_cpu():
    report = explain(sums_on_the_cpu, ones())
    found = finding(report, "device_copy")
    assert (found.where, found.argument) == (line("device"), "x")
    assert_clean(explain(sums_on_the_gpu, ones()))


def reads_item(x):
    index = (x * 2).argmax().item()  # MARK item
    return x.cumsum(0) + index


def keeps_index(x):
    return x.cumsum(0) + (x * 2).argmax()


def test_item_splits_the_graph():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = explain(reads_item, ones())
    found = finding(report, "item")
    assert (found.where, found.operator) == (line("item"), "Tensor.item")
    assert_clean(explain(keeps_index, ones()))


def calls_unsafe(x):
    y = x.cumsum(0)
    y = torch.ops.mla_ops_test_explain.no_capture(y)  # MARK unsafe
    return y.cumsum(0)


def test_unsafe_operator_splits_the_graph():
    report = explain(calls_unsafe, ones())
    found = finding(report, "unsafe_operator")
    assert (found.where, found.operator) == (line("unsafe"), "mla_ops_test_explain.no_capture")
    assert report.facts["partitions"] == 2
    assert report.facts["cudagraphs_recorded"] == 2
    assert_clean(explain(lambda x: x.cumsum(0).cumsum(0), ones()))


def doubled(x):
    return x.cumsum(0) * 2  # MARK silent


def test_graph_that_is_dropped_without_a_word():
    def inputs(step):
        x = ones(7)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    with torch._inductor.config.patch({"triton.cudagraph_skip_dynamic_graphs": True}):
        report = explain(doubled, inputs=inputs)
    found = finding(report, "cudagraph_silent")
    assert found.where == line("silent")
    assert "cudagraph_skip_dynamic_graphs = False" in found.fix
    assert found.fix.endswith("or give x fixed sizes")
    assert report.facts["cudagraphs_recorded"] == 0
    assert report.facts["cudagraphs_skipped"] == 0
    assert_clean(explain(doubled, inputs=inputs))


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = torch.zeros(WIDTH, device="cuda")

    def forward(self, x):
        return x - self.offset  # MARK address


def test_changed_address_is_recorded_again():
    model, kept = Offset(), []

    def replaced(step):
        model.offset = torch.full((WIDTH,), float(step), device="cuda")
        kept.append(model.offset)
        return (ones(),)

    report = explain(model, inputs=replaced, steps=4)
    found = finding(report, "changed_address")
    assert (found.where, found.argument) == (line("address"), "self.offset")
    assert report.facts["cudagraphs_rerecorded"] >= 1

    def written(step):
        model.offset.copy_(torch.full((WIDTH,), float(step)))
        return (ones(),)

    assert_clean(explain(model, inputs=written))


def summed(x):
    return x.cumsum(0)  # MARK sizes


def test_recording_for_each_size():
    def inputs(step):
        x = ones(3 + step // 2)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    report = explain(summed, inputs=inputs, steps=5)
    found = finding(report, "rerecorded")
    assert (found.where, found.argument) == (line("sizes"), "x")
    assert "3, 4, 5" in found.what
    assert report.facts["cudagraphs_recorded"] == 2

    def padded(step):
        return (nn.functional.pad(ones(3 + step // 2), (0, 2 - step // 2)),)

    assert_clean(explain(summed, inputs=padded, steps=5))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = torch.zeros(WIDTH, device="cuda")

    def forward(self, x):
        self.state = self.state * 0.5 + x  # MARK overwritten
        return self.state.sum()


class RecurrentInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(WIDTH, device="cuda"))

    def forward(self, x):
        self.state.copy_(self.state * 0.5 + x)
        return self.state.sum()


def test_overwritten_output():
    report = explain(Recurrent(), ones())
    found = finding(report, "overwritten_output")
    assert (found.where, found.argument) == (line("overwritten"), "self.state")
    assert "self.state.copy_(value)" in found.fix
    assert_clean(explain(RecurrentInPlace(), ones()))


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = x.cumsum(0)
        self.last = y + 1  # MARK kept
        return y


def test_kept_output():
    found = finding(explain(Keeping(), ones()), "kept_output")
    assert (found.where, found.argument) == (line("kept"), "self.last")


def test_figures_that_do_not_depend_on_the_device():
    """A break, a float and repeated metadata, as on the CPU."""

    def step(x, factor, lengths):
        first = mla_ops.mla_metadata(lengths, num_heads_q=16)
        second = mla_ops.mla_metadata(lengths, num_heads_q=16)
        torch._dynamo.graph_break()
        return x * factor, first.num_splits, second.num_splits

    lengths = torch.tensor([3, 70], dtype=torch.int32, device="cuda")
    report = explain(step, inputs=lambda number: (ones(), 0.5 + number, lengths))
    assert finding(report, "graph_break").operator == "torch._dynamo.graph_break"
    assert finding(report, "recompile_value").argument == "factor"
    assert finding(report, "metadata_launches").count == 1
