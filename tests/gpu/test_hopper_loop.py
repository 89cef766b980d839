"""scripts/decode_loop.py on one GPU: two ranks, every way of capturing, and a planted fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

ROOT = Path(__file__).parents[2]
SMALL = ("--preset", "small", "--layers", "3", "--max-seq-len", "512", "--steps", "60")


def run_loop(*options):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "decode_loop.py"), "--json", *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("capture", ["reduce-overhead", "full-graph"])
def test_two_ranks_decode_60_steps(capture):
    status, report = run_loop(
        *("--capture", capture, *SMALL, "--check-every", "10"),
        *("--batch-sizes", "4", "16", "32", "--data-parallel", "2"),
    )
    (run,) = report["runs"]
    assert (status, run["problems"]) == (0, []), run["problems"]
    assert run["recordings"] == [3, 3], "one for each size, all made before the first step"
    assert run["skips"] == [0, 0]
    assert run["replays"] == [60, 60], "one for each step, those of the warm-up left out"
    assert max(run["dummy_batches"]) > 0
    assert len(run["steps_of_size"]) > 1
    assert min(run["steps_checked"]) >= 6


def test_compiled_is_faster_than_eager_at_batch_16():
    """The small model; what an H200 must reach is measured with 27 layers."""
    status, report = run_loop(
        *("--compare-eager", "--batch-sizes", "16", "--data-parallel", "1", *SMALL),
    )
    assert "ratio" in report, [run["problems"] for run in report["runs"]]
    assert report["ratio"] > 1.5
    assert status == (0 if report["ratio"] >= 3 else 1)


@pytest.mark.parametrize("plant", ["wrong-scale", "lost-append"])
def test_planted_faults_are_found_in_replays(plant):
    status, report = run_loop(
        *("--capture", "full-graph", *SMALL, "--plant", plant),
        *("--batch-sizes", "16", "--data-parallel", "1"),
    )
    assert status == 1
    assert any("layer" in fault for fault in report["runs"][0]["problems"])
