"""What the doctor says is golden, its JSON is as documented, and what it calls ill is ill."""

import json
import re

import pytest
import torch
from expecttest import assert_expected_inline
from schemas import assert_documented, assert_matches

from mla_ops.__main__ import main
from mla_ops.cli import doctor
from mla_ops.cli.doctor_report import DoctorReport, split_reason
from mla_ops.ops._selection import backend_report
from mla_ops.testing.samples import OPERATORS, Sample

CPU = ["doctor", "--device", "cpu"]
ENVIRONMENT = {
    "mla_ops": "0.1.0",
    "python": "3.12.1",
    "platform": "Linux x86_64 AVX2",
    "threads": 8,
    "torch": "2.13.0+cpu",
    "cuda": None,
    "cuda_problem": "torch 2.13.0+cpu is built without CUDA (pip install --force-reinstall torch)",
    "driver": "570.1",
    "gpus": [],
    "triton": "triton 3.6.0",
    "flash_mla": "sgl-flash-mla 1.0.0",
    "transformers": None,
}
REASONS = {
    "flash_mla": ("flash_mla is not installed (pip install it)", "torch finds no CUDA device"),
    "gluon": ("needs compute capability 9.0, this device has 8.0",),
    "triton": ("torch finds no CUDA device (install a CUDA build of torch and a driver)",),
}


@pytest.fixture
def elsewhere(monkeypatch):
    """Replace what depends on the machine: versions, and the backends that need a GPU."""

    def report(*, device):
        real = backend_report(device="cpu")
        if torch.device(device).type == "cuda":
            real.reasons.update(REASONS)
        return real

    monkeypatch.setattr(doctor, "environment", lambda: dict(ENVIRONMENT))
    monkeypatch.setattr(doctor, "backend_report", report)
    monkeypatch.setattr(doctor, "find_flash_mla", lambda: type("Found", (), {"api": None}))


def test_text_is_golden(elsewhere, capsys):
    assert main(CPU) == 0
    assert_expected_inline(
        masked(capsys),
        """\
```
mla_ops doctor

environment
  mla_ops           0.1.0
  python            3.12.1
  platform          Linux x86_64 AVX2
  CPU threads       8
  torch             2.13.0+cpu
  CUDA of torch     none
  driver            570.1
  triton            triton 3.6.0
  flash_mla         sgl-flash-mla 1.0.0
  flash_mla API     none
  transformers      none
  GPU               none: torch 2.13.0+cpu is built without CUDA
                        fix: pip install --force-reinstall torch

backends
  flash_mla         no: flash_mla is not installed
                        fix: pip install it
                    no: torch finds no CUDA device
                        fix: pip install --force-reinstall torch
  gluon             no: needs compute capability 9.0, this device has 8.0
  triton            no: torch finds no CUDA device
                        fix: pip install --force-reinstall torch
  cpu               available on cpu
  reference         available on cpu
  auto              picks cpu

operators (opcheck)
  mla_metadata      ok on cpu
  mla_metadata_out  ok on cpu
  append_kv_        ok on cpu
  mla_decode        ok on cpu
  mla_decode_out    ok on cpu
  merge_states      ok on cpu

decode against float64
  cpu               ok on cpu, error <masked>
  reference         ok on cpu, error <masked>

verdict: ok: 6 operators and 2 backends pass; auto picks cpu on cpu
```
""",
    )


def masked(capsys):
    return re.sub(r"error \d\.\de-\d\d", "error <masked>", capsys.readouterr().out)


def test_json_is_as_documented_on_this_machine(capsys):
    assert main([*CPU, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert_documented(DoctorReport)
    assert_matches(report, DoctorReport)
    assert report["ok"]
    assert {check["name"] for check in report["operators"]} == set(OPERATORS)
    decoded = [check["name"] for check in report["decodes"]]
    assert decoded == [each["name"] for each in report["backends"] if each["available"]]
    assert {"cpu", "reference"} <= set(decoded)
    assert all(0 < check["relative_error"] < 5e-3 for check in report["decodes"])
    assert all(each["available"] or each["reasons"] for each in report["backends"])


def test_a_wrong_decode_and_a_crash_fail_the_command(elsewhere, capsys, monkeypatch):
    """A backend that is listed as available and answers wrongly must not be called healthy."""
    right = doctor.mla_decode

    def ill(*args, backend, **kwargs):
        if backend == "cpu":
            result = right(*args, backend=backend, **kwargs)
            return result._replace(out=result.out * 1.1)
        if args[0].dtype == torch.bfloat16:
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")
        return right(*args, backend=backend, **kwargs)

    monkeypatch.setattr(doctor, "mla_decode", ill)
    monkeypatch.setattr(doctor, "OPERATORS", {})
    assert main(CPU) == 1
    text = capsys.readouterr().out
    assert "cpu               FAILED on cpu, error 1.0e-01: AssertionError: out: relative" in text
    assert (
        "reference         FAILED on cpu: RuntimeError: CUDA error: an illegal memory access\n"
        in text
    )
    assert "verdict: FAILED: cpu, reference\n" in text


def test_an_operator_whose_schema_lies_fails_the_command(elsewhere, capsys, monkeypatch):
    with torch.library._scoped_library("mla_ops_ill", "DEF") as library:
        library.define("add_one(Tensor x) -> ()")
        library.impl("add_one", lambda x: x.add_(1) and None, "CPU")
        library.impl("add_one", lambda x: None, "Meta")
        op = torch.ops.mla_ops_ill.add_one.default
        sample = Sample("B1", op, (torch.zeros(1),))
        monkeypatch.setattr(doctor, "op_samples", lambda name, device: [sample])
        monkeypatch.setattr(doctor, "OPERATORS", {"add_one": None})
        assert main([*CPU, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert_matches(report, DoctorReport)
    assert not report["ok"]
    assert [check["passed"] for check in report["operators"]] == [False]
    assert "OpCheckError" in report["operators"][0]["error"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("nonsense", "device must be cpu, cuda or cuda:<index>, got 'nonsense' (use --device"),
        ("meta", "device must be cpu, cuda or cuda:<index>, got 'meta' (use --device"),
        ("cuda", "device must be available, got cuda on a machine without it (use --device cpu"),
    ],
)
def test_a_device_that_is_not_here_is_told_in_one_line(device, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--device", device]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(f"doctor: {message}")


def test_help_documents_the_json(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["doctor", "--help"])
    assert exit_info.value.code == 0
    assert 'schema: "mla_ops.doctor/1"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("none is installed (pip install x)", "none is installed", "pip install x"),
        ("is for 9.0 (H100, H200), here is 8.0", "is for 9.0 (H100, H200), here is 8.0", None),
        ("is for 9.0 (H100), not 8.0 (use y)", "is for 9.0 (H100), not 8.0", "use y"),
    ],
)
def test_a_reason_is_split_from_its_fix(text, reason, fix):
    assert split_reason(text) == {"reason": reason, "fix": fix}


@pytest.mark.gpu
def test_doctor_on_cuda_is_content(capsys):
    assert main(["doctor", "--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert_matches(report, DoctorReport)
    assert report["environment"]["gpus"]
    assert {check["device"] for check in report["operators"]} == {"cuda"}
    assert "triton" in [check["name"] for check in report["decodes"]]
