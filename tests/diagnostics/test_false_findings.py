"""explain is silent about what costs nothing, and blames no argument for the work of others."""

import faulty_models as models
import pytest
import torch
from faulty_models import WIDTH, ones
from torch import nn

from mla_ops import explain
from mla_ops.cli.model import DemoModel, demo_config, read_prompts


def assert_clean(report):
    assert report.ok, str(report)


def test_results_as_big_as_an_input_are_no_copies():
    """Symptom: relu of 2 MiB of activations was told to drop .clone() and .contiguous()."""
    assert_clean(explain(lambda x: x.relu() + 1, ones(512, 1024), mode="default"))
    report = explain(lambda x: x.t().contiguous(), ones(512, 1024), mode="default")
    assert [each.kind for each in report.findings] == ["big_copy"]


def test_sizes_that_come_back_are_buckets():
    """Symptom: sizes 3, 4, 3 were told to be padded "so that sizes come back"."""

    def inputs(step):
        x = ones((3, 4, 3)[step])
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    assert_clean(explain(models.summed, inputs=inputs))


@pytest.mark.parametrize("written", [False, True])
def test_what_one_graph_hands_to_the_next_is_not_the_users_to_hold(written):
    """Symptom: mark_static_address was advised for a value made between two breaks."""

    def step(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y.add_(1) if written else y * 2

    size = WIDTH * 4
    report = explain(step, ones(), big_bytes=1 << 20 if written else size)
    assert [each.argument for each in report.findings] == [None] + ["x"] * (not written)


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_found_in_an_mlp(compiled):
    mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    fn = torch.compile(mlp) if compiled else mlp
    report = explain(fn, inputs=lambda step: (torch.randn(4, WIDTH),))
    assert_clean(report)
    assert (report.facts["graphs"], report.facts["steps"]) == (1, 3)


def test_nothing_is_found_in_a_decode_step_of_ours():
    model = DemoModel(demo_config("small"), num_layers=2, batch_size=2, max_seq_len=128)
    model.prefill(read_prompts(2))
    report = explain(model)
    assert_clean(report)
    assert report.facts["metadata_launches"] == 1
