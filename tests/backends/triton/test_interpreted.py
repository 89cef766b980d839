"""The Triton kernels on the CPU, by Triton's interpreter, in a process of its own.

The interpreter is chosen when a kernel is decorated, so it cannot be switched on here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["decode", "metadata", "append_and_merge"])
def test_kernels_equal_the_reference_in_the_interpreter(name):
    script = Path(__file__).with_name(f"interpreted_{name}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
