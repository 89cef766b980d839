"""Which input makes torch record a graph again: the tensor whose size changes, or an integer."""

import faulty_models as models
import torch
from faulty_models import line, ones

from mla_ops import explain


def dynamic(*shape):
    x = ones(*shape)
    for dimension in range(len(shape)):
        torch._dynamo.mark_dynamic(x, dimension)
    return x


def rerecorded(report):
    return {each.argument: each for each in report.findings if each.kind == "rerecorded"}


def test_a_counter_that_changes_is_blamed_itself():
    """Symptom: the counter's changes were called sizes of x, with the advice to pad x."""
    report = explain(models.scaled, inputs=lambda step: (ones(), 3 + step), steps=6)
    assert [(each.kind, each.argument) for each in report.findings] == [
        ("recompile_value", "factor"),
        ("rerecorded", "factor"),
    ]
    found = report.findings[1]
    assert found.where == line("float")
    assert "5 values of factor in 5 calls (4, 5, 6, 7, 8)" in found.what
    assert "torch.tensor(factor)" in found.fix
    counter = torch.tensor(3)

    def written(step):
        counter.fill_(3 + step)
        return ones(), counter

    report = explain(models.scaled, inputs=written, steps=6)
    assert report.ok, str(report)


def test_an_integer_beside_sizes_that_come_back():
    """Symptom: x of the sizes 3 and 4 by turns was told to be padded for the integer's sake."""

    def inputs(step):
        return dynamic(3 + step % 2), 30 + step

    found = rerecorded(explain(models.scaled, inputs=inputs, steps=8))
    assert list(found) == ["factor"]


def test_each_tensor_has_its_sizes():
    def step(x, pair):
        return x.sum() + pair["y"].sum()

    def inputs(step):
        return dynamic(3 + step), {"y": dynamic(20 + step, 30 - step)}

    found = rerecorded(explain(step, inputs=inputs))
    assert list(found) == ["x", "pair['y']"]
    assert "3 sizes of x in 3 calls (3, 4, 5)" in found["x"].what
    assert "(20x30, 21x29, 22x28)" in found["pair['y']"].what
    assert "pad pair['y']" in found["pair['y']"].fix


def test_combinations_of_sizes_that_come_back():
    """Each of x and y is a bucket; a CUDA graph is recorded for each pair."""

    def step(x, y):
        return x.sum() + y.sum()

    def inputs(step):
        return dynamic(3 + step % 2), dynamic(10 + step // 2 % 2)

    found = rerecorded(explain(step, inputs=inputs, steps=4))
    assert list(found) == ["x", "y"]
