"""Report: its JSON, its table with and without rich, and the exception it raises."""

import json
import sys

import faulty_models as models
import pytest
import torch
from faulty_models import WIDTH, line

from mla_ops import explain
from mla_ops.diagnostics.finding import KINDS


def test_json_and_strict():
    report = explain(
        models.scaled, inputs=lambda step: (torch.ones(WIDTH), 0.5 + step), mode="default"
    )
    body = json.loads(report.to_json())
    assert set(body) == {"schema", "ok", "facts", "findings"}
    assert body["ok"] is False
    assert body["facts"]["recompiles"] == 1
    (found,) = body["findings"]
    assert set(found) == {
        *("kind", "what", "fix", "where", "argument", "operator", "bytes", "count")
    }
    assert found["where"] == line("float")
    with pytest.raises(RuntimeError, match=r"1 finding;(.|\n)*- recompile_value factor"):
        report.raise_if_failed()
    with pytest.raises(RuntimeError, match="recompile_value"):
        explain(models.scaled, inputs=lambda step: (torch.ones(WIDTH), 2.5 + step), strict=True)
    explain(models.whole, torch.ones(WIDTH), strict=True).raise_if_failed()


def test_table_without_rich(monkeypatch):
    report = explain(models.writes_argument, torch.ones(WIDTH), torch.zeros(4, WIDTH))
    assert "─" in str(report)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    text = str(report)
    assert "─" not in text
    assert "- mutated_input kv copy_ at " in text
    assert f"cost: {KINDS['mutated_input']}" in text.replace("\n        ", " ")
