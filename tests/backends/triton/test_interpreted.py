"""The Triton kernels on the CPU, by Triton's interpreter, in a process of its own.

The interpreter is chosen when a kernel is decorated, so it cannot be switched on here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


SCRIPTS = sorted(Path(__file__).parent.glob("interpreted_*.py"))


def test_every_kernel_has_a_script():
    named = " ".join(script.stem for script in SCRIPTS)
    assert all(kernel in named for kernel in ("decode", "metadata", "append", "merge"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_kernels_equal_the_reference_in_the_interpreter(script):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
