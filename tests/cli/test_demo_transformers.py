"""The transformers demo's claims hold, and one that does not is told."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.16")

from mla_ops.cli import demo_transformers as command


def rows(monkeypatch, **settings):
    for name, value in ({"PROMPT_TOKENS": 800} | settings).items():
        monkeypatch.setattr(command, name, value)
    return command.demo_transformers(device=torch.device("cpu"), num_layers=1, steps=4)


def test_claims_hold(monkeypatch):
    found = {row.name: row for row in rows(monkeypatch)}
    assert all(row.holds for row in found.values())
    assert found["tokens equal, compiled"].value is True
    assert found["graphs over 3 generate calls"].value == 1
    assert found["layers that decode absorbed"].value == 1


def test_a_claim_that_fails_is_told(monkeypatch):
    found = {row.name: row for row in rows(monkeypatch, LOGIT_TOLERANCE=0.0)}
    assert not found["max logit difference"].holds
