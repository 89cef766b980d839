"""A NaN that a backend returns is told in words; the JSON stays JSON."""

import json

import pytest
import torch
from schemas import assert_matches

from mla_ops.__main__ import main
from mla_ops.cli import bench, doctor
from mla_ops.cli.bench_report import BenchReport
from mla_ops.cli.bench_step import DecodeStep
from mla_ops.cli.bench_timing import Ceilings
from mla_ops.cli.doctor_report import DoctorReport


def parsed(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_doctor(capsys, monkeypatch, value):
    """Symptom: "relative_error": NaN, which jq and JavaScript refuse."""
    right = doctor.mla_decode

    def ill(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        return result if backend == "reference" else result._replace(out=result.out * value)

    monkeypatch.setattr(doctor, "mla_decode", ill)
    monkeypatch.setattr(doctor, "OPERATORS", {})
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    report = parsed(capsys.readouterr().out)
    assert_matches(report, DoctorReport)
    found = {check["name"]: check for check in report["decodes"]}
    assert found["cpu"]["relative_error"] is None
    assert not found["cpu"]["passed"]
    assert found["reference"]["passed"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bench(capsys, monkeypatch, value):
    right = DecodeStep.decode

    def wrong(*args):
        result = right(*args)
        return result._replace(out=result.out * value)

    monkeypatch.setattr(DecodeStep, "decode", wrong)
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(10.0, 0.1))
    options = ["--heads", "3", "--batch", "1", "--length", "65", "--backends", "cpu"]
    assert main(["bench", "--device", "cpu", *options, "--modes", "eager", "--json"]) == 1
    report = parsed(capsys.readouterr().out)
    assert_matches(report, BenchReport)
    (result,) = report["results"]
    assert result["relative_error"] is None
    assert result["refused"].startswith("wrong: relative error ")
