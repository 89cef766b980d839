"""held_tensors names what a function reaches, by the shortest way."""

import torch
from torch import nn

from mla_ops._torch import storage_id
from mla_ops.diagnostics.holders import held_tensors


class Box:
    def __init__(self, **items):
        self.__dict__.update(items)


def test_buffers_closures_and_attributes_have_their_names():
    kept, listed, kv = torch.ones(1), torch.ones(2), torch.ones(3)
    model = nn.Sequential(nn.Identity())
    model[0].register_buffer("kv", kv)
    model.states = {"last": [listed]}

    def step():
        return kept

    assert held_tensors(step) == {storage_id(kept): "kept"}
    names = held_tensors(model)
    assert names[storage_id(kv)] == "self[0].kv"
    assert names[storage_id(listed)] == "self.states['last'][0]"


def test_an_object_met_too_deep_is_looked_at_again_nearer():
    """Symptom: what the deeper of two ways could not reach had no name, so it was not reported."""
    kept = torch.ones(1)
    shared = Box(inner=Box(tensor=kept))
    model = nn.Identity()
    model.far = Box(a=Box(b=Box(c=Box(shared=shared))))
    model.near = shared
    assert held_tensors(model) == {storage_id(kept): "self.near.inner.tensor"}
