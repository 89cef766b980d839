"""Tests are skipped for the hardware they lack, and fail for it when it is required."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.gpu
def test_gpu():
    pass

@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two():
    pytest.skip("from inside")

@pytest.mark.slow
def test_slow():
    pass

def test_plain():
    pytest.skip("no hardware")
"""
MARKERS = "".join(f"\n    {name}: x" for name in ("gpu", "sm90", "multi_gpu", "slow"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "4 skipped"),
        (["--require-gpu", "--slow"], "1 passed, 1 skipped, 2 errors"),
    ],
)
def test_options(tmp_path, options, expected):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers ={MARKERS}\n")
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *options],
        cwd=tmp_path,
        # Whatever this machine has, the tests see no GPU.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert expected in answer.stdout, answer.stdout + answer.stderr
    if not options:
        assert "needs a CUDA device" in answer.stdout
        assert "run it with --slow" in answer.stdout
    else:
        assert "--require-gpu allows no skip" in answer.stdout
        assert answer.returncode == 1
