"""What ``doctor`` finds: the documented shape of its JSON, and the text for an issue."""

from __future__ import annotations

import re
from typing import TypedDict

from mla_ops.diagnostics.environment import Environment

__all__ = ["BackendFinding", "CheckFinding", "DoctorReport", "Reason", "as_text", "split_reason"]


class Reason(TypedDict):
    """Why a backend does not run.

    Attributes:
        reason: what is missing.
        fix: the command or setting that mends it; null where only other hardware would.
    """

    reason: str
    fix: str | None


class BackendFinding(TypedDict):
    """One backend.

    Attributes:
        name: as in ``backend=``.
        device: the device it was asked about, "cpu" or "cuda".
        available: whether it says that it runs here.
        reasons: all of them; empty if it is available.
    """

    name: str
    device: str
    available: bool
    reasons: list[Reason]


class CheckFinding(TypedDict):
    """One check that was run.

    Attributes:
        name: the operator or the backend.
        device: where it ran.
        passed: whether it held.
        relative_error: of a decode, RMS against float64; null for an operator, after a crash, and
            where it is not finite.
        error: what failed; null if it passed.
    """

    name: str
    device: str
    passed: bool
    relative_error: float | None
    error: str | None


class DoctorReport(TypedDict):
    """All that ``doctor --json`` prints.

    Attributes:
        schema: "mla_ops.doctor/1"; the number changes when a field changes its meaning.
        environment: versions and devices.
        flash_mla_api: the dense decode that the installed flash_mla offers; null if none.
        backends: every backend, available or not.
        auto: the backend that "auto" picks for a bf16 decode of one sequence.
        operators: opcheck of every operator.
        decodes: a decode by every available backend, compared with float64.
        ok: whether all checks passed.
        verdict: the same in words.
    """

    schema: str
    environment: Environment
    flash_mla_api: str | None
    backends: list[BackendFinding]
    auto: str
    operators: list[CheckFinding]
    decodes: list[CheckFinding]
    ok: bool
    verdict: str


_LABELS = {
    "mla_ops": "mla_ops",
    "python": "python",
    "platform": "platform",
    "threads": "CPU threads",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "driver": "driver",
    "triton": "triton",
    "flash_mla": "flash_mla",
    "transformers": "transformers",
}
_WIDTH = 17


def as_text(report: DoctorReport) -> str:
    """Write the report as a fenced block that can be pasted into an issue as it is."""
    lines = ["```", "mla_ops doctor", "", "environment", *_environment_lines(report)]
    lines += ["", "backends"]
    for backend in report["backends"]:
        lines += _backend_lines(backend)
    lines.append(_line("auto", f"picks {report['auto']}"))
    lines += ["", "operators (opcheck)"]
    lines += [_line(check["name"], _outcome(check)) for check in report["operators"]]
    lines += ["", "decode against float64"]
    lines += [_line(check["name"], _outcome(check)) for check in report["decodes"]]
    return "\n".join([*lines, "", f"verdict: {report['verdict']}", "```"])


def split_reason(text: str) -> Reason:
    """Split "what is missing (what mends it)", as backends write it."""
    match = re.fullmatch(r"(.+) \((.+)\)", text, re.DOTALL)
    return {"reason": match[1], "fix": match[2]} if match else {"reason": text, "fix": None}


def _environment_lines(report: DoctorReport) -> list[str]:
    facts: dict[str, object] = {**report["environment"]}
    lines = [_line(label, _shown(facts[key])) for key, label in _LABELS.items()]
    lines.insert(-1, _line("flash_mla API", _shown(report["flash_mla_api"])))
    gpus = report["environment"]["gpus"]
    lines += [_line(f"GPU {index}", gpu) for index, gpu in enumerate(gpus)]
    problem = report["environment"]["cuda_problem"]
    if problem is None:
        return lines
    return lines + _reason_lines("GPU", "none", split_reason(problem))


def _backend_lines(backend: BackendFinding) -> list[str]:
    if backend["available"]:
        return [_line(backend["name"], f"available on {backend['device']}")]
    lines: list[str] = []
    for reason in backend["reasons"]:
        lines += _reason_lines("" if lines else backend["name"], "no", reason)
    return lines


def _reason_lines(label: str, answer: str, reason: Reason) -> list[str]:
    lines = [_line(label, f"{answer}: {reason['reason']}")]
    return [*lines, _line("", f"    fix: {reason['fix']}")] if reason["fix"] else lines


def _outcome(check: CheckFinding) -> str:
    error = "" if check["relative_error"] is None else f", error {check['relative_error']:.1e}"
    if check["passed"]:
        return f"ok on {check['device']}{error}"
    return f"FAILED on {check['device']}{error}: {check['error']}"


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _line(label: str, text: str) -> str:
    return f"  {label:{_WIDTH}} {text}"
