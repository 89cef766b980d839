"""``python -m mla_ops doctor``: what runs here, why the rest does not, and whether it is right."""

from __future__ import annotations

import argparse
import inspect
import sys

import torch

from mla_ops.backends.flash_mla_api import find_flash_mla
from mla_ops.cli.doctor_report import (
    BackendFinding,
    CheckFinding,
    DoctorReport,
    Reason,
    as_text,
    split_reason,
)
from mla_ops.cli.options import available_device, default_device
from mla_ops.diagnostics.environment import Environment, environment
from mla_ops.diagnostics.json_text import json_text
from mla_ops.ops._selection import BACKENDS, backend_report
from mla_ops.ops.decode import mla_decode
from mla_ops.testing.inputs import make_decode_inputs
from mla_ops.testing.numerics import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.samples import OPERATORS, op_samples

__all__ = ["configure", "examine", "run"]

SCHEMA = "mla_ops.doctor/1"
# An empty row, a row of one token, and lengths on both sides of a page's end.
LENGTHS = (0, 1, 64, 65, 300)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--device", default=default_device(), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON, described below")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    described = (DoctorReport, Environment, BackendFinding, Reason, CheckFinding)
    parser.epilog = "JSON:\n\n" + "\n\n".join(
        f"{kind.__name__}: {inspect.getdoc(kind)}" for kind in described
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if something that is said to be available fails."""
    try:
        device = available_device("doctor", options.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    report = examine(device)
    print(json_text(report) if options.json else as_text(report))
    return 0 if report["ok"] else 1


@torch.no_grad()
def examine(device: torch.device) -> DoctorReport:
    """Look at the machine, then run every operator and every backend that is available.

    Args:
        device: where the operators are checked; every backend is asked about its own.
    """
    seen = environment()
    backends = [_backend(name, device, seen["cuda_problem"]) for name in BACKENDS]
    operators = [_opcheck(name, device) for name in OPERATORS]
    decodes = [
        _decode(backend["name"], torch.device(backend["device"]))
        for backend in backends
        if backend["available"]
    ]
    auto = backend_report(device=device).choice
    failed = [check["name"] for check in operators + decodes if not check["passed"]]
    verdict = (
        f"FAILED: {', '.join(failed)}"
        if failed
        else f"ok: {len(operators)} operators and {len(decodes)} backends pass; "
        f"auto picks {auto} on {device}"
    )
    found = find_flash_mla().api
    return {
        "schema": SCHEMA,
        "environment": seen,
        "flash_mla_api": None if found is None else _api(found.name, found.plan is None),
        "backends": backends,
        "auto": auto,
        "operators": operators,
        "decodes": decodes,
        "ok": not failed,
        "verdict": verdict,
    }


def _api(name: str, reads_our_schedule: bool) -> str:
    return f"{name} ({'reads the schedule of mla_ops' if reads_our_schedule else 'plans itself'})"


def _backend(name: str, device: torch.device, cuda_problem: str | None) -> BackendFinding:
    gpu = str(device) if device.type == "cuda" else "cuda"
    own = {"cpu": "cpu", "reference": str(device)}.get(name, gpu)
    reasons = backend_report(device=own).reasons[name]
    return {
        "name": name,
        "device": own,
        "available": not reasons,
        "reasons": [_reason(text, cuda_problem) for text in reasons],
    }


def _reason(text: str, cuda_problem: str | None) -> Reason:
    reason = split_reason(text)
    if cuda_problem is not None and reason["reason"] == "torch finds no CUDA device":
        # What mends that depends on the build of torch and the driver, not on the backend.
        reason["fix"] = split_reason(cuda_problem)["fix"]
    return reason


def _opcheck(name: str, device: torch.device) -> CheckFinding:
    try:
        sample = op_samples(name, device=device)[0]
        torch.library.opcheck(sample.op, sample.args)
    except Exception as error:
        return _finding(name, device, error=error)
    return _finding(name, device)


def _decode(backend: str, device: torch.device) -> CheckFinding:
    """Decode hostile inputs and compare with the reference in float64."""
    relative_error = None
    try:
        inputs = make_decode_inputs(LENGTHS, device=device)
        out, lse = mla_decode(*inputs[:4], softmax_scale=inputs.softmax_scale, backend=backend)
        expected, expected_lse = mla_decode(
            *(inputs.q.double(), inputs.kv_cache.double(), *inputs[2:4]),
            softmax_scale=inputs.softmax_scale,
            backend="reference",
        )
        relative_error = float((out.double() - expected).norm() / expected.norm())
        assert_close_to_fp64(out, expected)
        assert_lse_close_to_fp64(lse, expected_lse.double())
    except Exception as error:
        return _finding(backend, device, error, relative_error)
    return _finding(backend, device, None, relative_error)


def _finding(
    name: str,
    device: torch.device,
    error: Exception | None = None,
    relative_error: float | None = None,
) -> CheckFinding:
    reason = None
    if error is not None:
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
    return {
        "name": name,
        "device": str(device),
        "passed": error is None,
        "relative_error": relative_error,
        "error": reason,
    }
