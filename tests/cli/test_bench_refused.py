"""Times are shown only for right results: of every sequence, every pool, out and lse."""

import json
import re

import pytest
import torch
import torch._dynamo

from mla_ops.__main__ import main
from mla_ops.cli import bench
from mla_ops.cli.bench_step import DecodeStep

SMALL = ["bench", "--device", "cpu", "--heads", "3", "--batch", "1,2", "--length", "65"]


def test_a_wrong_result_has_no_time(quick, capsys, monkeypatch):
    """Symptom elsewhere: a kernel that skips half its keys wins the benchmark."""

    def never(run, device):
        raise AssertionError("timed although it is wrong")

    right = DecodeStep.decode

    def wrong(*args):
        result = right(*args)
        return result._replace(out=result.out * 1.001)

    monkeypatch.setattr(bench, "measure_us", never)
    monkeypatch.setattr(DecodeStep, "decode", wrong)
    assert main([*SMALL, "--backends", "cpu", "--modes", "eager"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "refused" in line]
    assert len(lines) == 2
    assert all("refused: wrong: relative error 1.0e-03, budget 1e-05" in line for line in lines)


def of_sequences(step, pool, result):
    out = result.out.clone()
    out[2:] = 0
    return result._replace(out=out)


def of_the_middle_pool(step, pool, result):
    return result._replace(out=result.out * (pool.data_ptr() != step.kv[1].data_ptr()))


def of_lse(step, pool, result):
    return result._replace(lse=result.lse + 1)


def of_no_number(step, pool, result):
    last = pool.data_ptr() == step.kv[-1].data_ptr()
    return result._replace(out=result.out * torch.nan) if last else result


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (of_sequences, r"relative error [89]\.\de-01, budget 1e-05, in pool 1 of 3"),
        (of_the_middle_pool, r"relative error 1\.0e\+00, budget 1e-05, in pool 2 of 3"),
        (of_lse, r"lse off by 1\.0e\+00, budget 1e-03, in pool 1 of 3"),
        (of_no_number, r"relative error nan, budget 1e-05, in pool 3 of 3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_part_has_no_time(wrong, problem, quick, capsys, monkeypatch):
    """Symptom: only two sequences, the outer pools and out were compared, the rest was timed.

    NaN from the last of the pools was passed over by max().
    """
    right = DecodeStep.decode
    monkeypatch.setattr(
        DecodeStep, "decode", lambda step, pool, *args: wrong(step, pool, right(step, pool, *args))
    )
    assert main([*SMALL, "--batch", "8", "--backends", "cpu", "--modes", "eager"]) == 1
    assert re.search(f"refused: wrong: {problem}", capsys.readouterr().out)


def test_a_result_of_an_earlier_run_has_no_time(quick, capsys, monkeypatch):
    """A kernel that writes nothing may be given the memory of a right result."""
    right, kept = DecodeStep.decode, {}

    def stale(step, pool, *args):
        return kept.setdefault(pool.data_ptr(), right(step, pool, *args))

    monkeypatch.setattr(DecodeStep, "decode", stale)
    assert main([*SMALL, "--batch", "1", "--backends", "cpu", "--modes", "eager"]) == 1
    assert "refused: wrong: relative error nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError, torch._dynamo.exc.FailOnRecompileLimitHit]
)
def test_a_crash_is_a_refusal_with_its_first_line(error, quick, capsys, monkeypatch):
    def crash(step, mode):
        raise error("CUDA out of memory. Tried\nmore")

    monkeypatch.setattr(bench, "prepare", crash)
    assert main([*SMALL, "--modes", "eager", "--backends", "cpu", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)["results"]
    expected = f"{error.__name__}: CUDA out of memory. Tried"
    assert {each["refused"] for each in results} == {expected}
    assert {each["us"] for each in results} == {None}
