"""The first call of a process may be inside a capture, or compiled: nothing is set up lazily."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SCRIPT = Path(__file__).parent / "fresh_process.py"
CASES = [
    ("first_call_under_capture", "flash_mla"),
    ("first_call_under_capture", "triton"),
    ("first_call_in_inference_mode", "flash_mla"),
    ("first_capture_after_warmup", "flash_mla"),
    ("first_capture_after_warmup", "gluon"),
    ("first_capture_after_warmup", "triton"),
    ("first_call_compiled", "flash_mla"),
    ("first_call_compiled", "auto"),
]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start every process at once: each takes 10 seconds, most of them to import and compile."""
    processes = {}
    for case in CASES:
        # A cache of its own: kernels that an earlier run compiled would hide a first call.
        cache = str(tmp_path_factory.mktemp("cache"))
        processes[case] = subprocess.Popen(
            [sys.executable, str(SCRIPT), *case],
            env={
                **os.environ,
                "TRITON_CACHE_DIR": cache,
                "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    yield processes
    for process in processes.values():
        process.kill()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_first_call(started, case):
    output, _ = started[case].communicate(timeout=200)
    worked = started[case].returncode == 0 and output.strip().endswith("OK")
    may_ask = case[0] in ("first_call_under_capture", "first_call_in_inference_mode")
    assert worked or (may_ask and "warmup" in output), output
