"""scripts/decode_loop.py on the CPU: two ranks for 100 steps, and planted faults it must find."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import _loop_capture
import _loop_worker
import decode_loop
import pytest
import torch
from _loop_capture import Captured
from _loop_plants import PLANTS
from _loop_report import problems
from _loop_requests import Rows, Traffic
from _loop_worker import Result, Settings, Worker

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = Settings(
    capture="none",
    device="cpu",
    preset="small",
    dtype="fp32",
    layers=2,
    steps=60,
    batch_sizes=(2, 4),
    data_parallel=1,
    max_seq_len=128,
    check_every=5,
    seed=0,
)
CAPTURED_SIZES = (16, 32, 64, 128, 256, 512)


def run_script(cache, *options):
    # Both ranks build the same C++ kernels: a new, shared cache halves that.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "decode_loop.py"), "--device", "cpu", *options],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_two_ranks_decode_100_steps_compiled(tmp_path):
    done = run_script(
        *(tmp_path, "--preset", "small", "--layers", "1", "--steps", "100"),
        *("--batch-sizes", "2", "4", "8", "--check-every", "10", "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(done.stdout)
    (run,) = report["runs"]
    assert report["passed"]
    assert run["how"] == "compiled; the CPU has no CUDA graphs"
    assert run["graphs"] == [1, 1], "one graph serves every size"
    assert run["recordings"] == [None, None]
    assert sum(run["steps_of_size"].values()) == 100
    assert set(run["steps_of_size"]) == {"2", "4", "8"}
    assert min(run["steps_checked"]) > 10
    assert run["steps_checked"][0] == run["steps_checked"][1]
    assert max(run["dummy_batches"]) > 0
    assert sum(run["pages_handed_out"]) > 2 * run["num_pages"], "pages are used again"
    assert 0 < run["padding_waste"] < 1
    assert "100/100" in done.stderr or "step 90 of 100" in done.stderr


def test_a_planted_fault_fails_the_program(tmp_path):
    done = run_script(
        *(tmp_path, "--preset", "small", "--layers", "1", "--steps", "20", "--capture", "none"),
        *("--data-parallel", "1", "--plant", "stale-metadata"),
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "FAULT: rank 0, step 0: check_metadata" in done.stdout
    assert done.stdout.rstrip().endswith("FAILED")


def test_whole_loop_has_no_fault():
    result = Worker(SMALL, 0, "").run()
    assert result.faults == []
    assert result.finished > 5
    assert result.pages_handed_out > SMALL.num_pages


FINDINGS = {
    "stale-metadata": "metadata must be",
    "lost-append": "is not the one appended",
    "shared-pages": "belongs to rows",
    "kept-rows": "instead of 0",
    "wrong-scale": "layer 0 of batch",
    "written-padding": "an older key has changed",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found(plant):
    result = Worker(dataclasses.replace(SMALL, plant=plant), 0, "").run()
    assert any(FINDINGS[plant] in fault for fault in result.faults), result.faults[:3]


def serve_without_model(seed, rank, steps=2000):
    """Play the traffic of a run; return the sizes, and what was seated at each step."""
    settings = dataclasses.replace(
        SMALL, batch_sizes=CAPTURED_SIZES, steps=steps, max_seq_len=1024
    )
    rows = Rows(CAPTURED_SIZES, settings.num_pages, 64)
    traffic = Traffic(
        CAPTURED_SIZES,
        phase_steps=settings.phase_steps,
        max_prompt=512,
        max_output=settings.phase_steps,
        seed=seed,
        rank=rank,
    )
    sizes, seated, pages = [], [], 0
    for step in range(steps):
        rows.leave()
        seated.append(rows.enter(traffic.arrivals(step, rows.in_flight)))
        held = sum(-(-active.request.total // 64) for active in rows.active.values())
        pages = max(pages, held)
        sizes.append(rows.batch_size)
        rows.advance()
    assert pages <= settings.num_pages
    return sizes, seated


@pytest.mark.parametrize("rank", [0, 1])
def test_traffic_visits_every_size_and_idles(rank):
    sizes, seated = serve_without_model(0, rank)
    assert set(sizes) == {0, *CAPTURED_SIZES}
    assert sum(map(len, seated)) > 1000
    assert sizes[0] == (16 if rank == 0 and seated[0] else 0)


def test_traffic_follows_from_the_seed():
    assert serve_without_model(3, 0) == serve_without_model(3, 0)
    assert serve_without_model(3, 0) != serve_without_model(4, 0)
    assert serve_without_model(3, 0) != serve_without_model(3, 1)


def test_requests_wait_for_pages():
    rows = Rows((4,), num_pages=8, page_size=64)
    traffic = Traffic((4,), phase_steps=50, max_prompt=400, max_output=20, seed=1, rank=0)
    waited = 0
    for step in range(200):
        rows.leave()
        rows.enter(traffic.arrivals(step, rows.in_flight))
        waited += rows.in_flight > len(rows.active)
        assert sum(-(-each.request.total // 64) for each in rows.active.values()) <= 8
        rows.advance()
    assert waited > 0
    assert rows.finished > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--capture", "full-graph"], "on the CPU, got full-graph"),
        (["--device", "cpu", "--capture", "none", "--compare-eager"], "nothing to compare"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--batch-sizes", "0", "4"], "batch_sizes must be at least 1, got 0"),
        (["--max-seq-len", "7"], "max_seq_len must be at least 8, got 7"),
    ],
)
def test_what_cannot_run_is_refused_by_one_line(capsys, options, message):
    assert decode_loop.main(options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_rank_that_dies_is_a_fault():
    results, crash = decode_loop.serve(dataclasses.replace(SMALL, preset="no-such-model"))
    assert results == []
    assert crash.startswith("a rank died")
    assert "no-such-model" in crash


GOOD = Captured(graphs=1, recordings=2, replays=60, skips=0)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (GOOD, None),
        (GOOD._replace(recordings=3), "3 recordings of 2 sizes"),
        (GOOD._replace(recordings=1), "1 recordings of 2 sizes"),
        (GOOD._replace(recordings=0), "0 recordings"),
        (GOOD._replace(recordings=None), "None recordings"),
        (GOOD._replace(skips=1, reasons=("mutated inputs",)), "1 skips mutated inputs"),
        (GOOD._replace(skips=None), "None skips"),
        (GOOD._replace(replays=59), "59 replays in 60 steps"),
        (GOOD._replace(replays=64), "64 replays in 60 steps"),
        (GOOD._replace(replays=None), "None replays"),
    ],
)
def test_captures_that_are_not_as_promised_are_problems(seen, message):
    settings = dataclasses.replace(SMALL, capture="reduce-overhead", device="cuda")
    found = problems(settings, [Result(checks=1, captured=seen)])
    assert [text for text in found if message is None or message not in text] == []
    assert len(found) == (message is not None)


def test_replays_of_the_warm_up_are_no_replays_of_steps(monkeypatch):
    """Symptom: eager steps, as many as the warm-up replayed, went unnoticed."""
    calls = []

    def result():
        # Each size warms up, records, and replays what it recorded from then on.
        sizes = [size for index, size in enumerate(calls) if size in calls[:index]]
        return SimpleNamespace(
            graphs=1, recordings=len(set(sizes)), replays=len(sizes), skips=0, reasons=()
        )

    @contextlib.contextmanager
    def measuring():
        yield SimpleNamespace(result=result)

    monkeypatch.setattr(_loop_capture, "measuring", measuring)
    monkeypatch.setattr(torch, "compile", lambda model, **options: calls.append)
    model = SimpleNamespace(tokens=SimpleNamespace(is_cuda=True))
    with _loop_capture._compiled(model, (2, 4)) as stepper:
        for size in (2, 2, 4):
            stepper.step(size)
        assert stepper.captured() == Captured(1, recordings=2, replays=3, skips=0)


def test_a_run_without_checks_or_with_faults_is_no_pass():
    assert problems(SMALL, [Result()]) == ["no step was checked"]
    assert problems(SMALL, [Result(checks=1, faults=["wrong"])]) == ["wrong"]


def test_progress_without_tqdm_is_plain_lines(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(_loop_worker._progress(20, "none", shown=True)) == list(range(20))
    assert capsys.readouterr().err.splitlines()[1] == "none: step 2 of 20"
