"""Which faults of torch are still there: a canary that dies tells that a remedy can go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from canaries import CANARIES

# The first torch release without the fault, None: no release yet. Run on 2.11.0, 2.13.0, 2.14.1.
MENDED = {**dict.fromkeys(CANARIES), "two_views_of_one_storage": (2, 13)}
VERSION = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))


@pytest.fixture(scope="module")
def faults():
    """Run in a process of its own: mla_ops mends torch for the whole of this one."""
    script = Path(__file__).parent / "canaries.py"
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CANARIES)
def test_torch_has_the_fault_until_the_release_noted(name, faults):
    """When this fails, torch has changed: note the release in MENDED and in the remedy."""
    mended = MENDED[name]
    assert faults[name] == (mended is None or mended > VERSION)
