"""Times are shown in a golden table, and errors come in one line."""

import copy
import csv
import io
import json
import re
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from schemas import assert_documented, assert_matches

from mla_ops.__main__ import main
from mla_ops.cli import bench
from mla_ops.cli.bench_plot import plot
from mla_ops.cli.bench_report import BenchReport, as_csv, as_table

SMALL = ["bench", "--device", "cpu", "--heads", "3", "--batch", "1,2", "--length", "65"]
RESULT = {
    "batch_size": 1,
    "length": 1024,
    "backend": "cpu",
    "mode": "eager",
    "us": 1234.56,
    "spread": 0.02,
    "roof_us": 300.0,
    "gb_s": 1.911,
    "tflop_s": 0.02888,
    "relative_error": 1e-6,
    "refused": None,
}
REFUSED = {"us": None, "spread": None, "gb_s": None, "tflop_s": None}
REPORT = {
    "schema": "mla_ops.bench/1",
    "date": "2026-01-31",
    "environment": {"gpus": ["NVIDIA H200, compute capability 9.0, 132 SMs, 140 GiB"]},
    "device": "cuda",
    "dtype": "bfloat16",
    "preset": "deepseek-v3",
    "num_heads_q": 128,
    "head_dim": 576,
    "head_dim_v": 512,
    "page_size": 64,
    "bandwidth_gb_s": 4200.25,
    "matrix_tflop_s": 712.3,
    "results": [
        RESULT,
        {
            **RESULT,
            "length": 32768,
            "backend": "flash_mla",
            "mode": "reduce-overhead",
            "us": 412.5,
        },
        {**RESULT, "length": 32768, "spread": 0.3},
        {**RESULT, **REFUSED, "batch_size": 128, "refused": "wrong: relative error 2, budget 1"},
    ],
}


def test_table_is_golden():
    assert_expected_inline(
        as_table(REPORT),
        """\
deepseek-v3: 128 heads, D 576, V 512, bfloat16, pages of 64, on NVIDIA H200
time of one decode; roof from 4200.2 GB/s and 712.30 TFLOP/s, measured here

batch  length  backend    mode                  us  roof us  of roof  GB/s  TFLOP/s
    1    1024  cpu        eager             1234.6    300.0      24%   1.9   0.0289
    1   32768  flash_mla  reduce-overhead    412.5    300.0      73%   1.9   0.0289
    1   32768  cpu        eager            ~1234.6    300.0      24%   1.9   0.0289
  128    1024  cpu        eager            refused: wrong: relative error 2, budget 1

~ restless: quartiles more than 20% apart (is this machine idle?)""",
    )


def test_csv_has_a_line_for_each_result():
    rows = list(csv.DictReader(io.StringIO(as_csv(REPORT))))
    assert [row["us"] for row in rows] == ["1234.56", "412.5", "1234.56", ""]
    assert list(rows[0]) == list(RESULT)


def test_bench_on_the_cpu(quick, capsys):
    assert main([*SMALL, "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert_documented(BenchReport)
    assert_matches(report, BenchReport)
    cases = [(r["batch_size"], r["backend"], r["mode"]) for r in report["results"]]
    assert cases == [
        (batch, backend, mode)
        for batch in (1, 2)
        for backend in ("cpu", "reference")
        for mode in ("eager", "compile")
    ]
    for result in report["results"]:
        moved = result["batch_size"] * 65 * 576 * 4
        assert result["us"] > 0
        assert result["gb_s"] == pytest.approx(moved / result["us"] * 1e-3)
        assert 0 < result["relative_error"] < 1e-5
        assert result["roof_us"] == pytest.approx(moved / 10.0 * 1e-3)
    assert shown.err.splitlines()[-1] == "bench: 8/8 batch 2 length 65 reference compile"
    table = as_table(report).split("\n\n~")[0]
    table = re.sub(r"~?\b\d+(\.\d+)?(e-\d+)?%?(?=[ )]|$)", "#", table, flags=re.MULTILINE)
    assert_expected_inline(
        re.sub(" +", " ", table.replace("~#", "#")),
        """\
deepseek-v2-lite: # heads, D 576, V 512, float32, pages of 64, on cpu (threads: #)
time of one decode; roof from # GB/s and # TFLOP/s, measured here

batch length backend mode us roof us of roof GB/s TFLOP/s
 # # cpu eager # # # # #
 # # cpu compile # # # # #
 # # reference eager # # # # #
 # # reference compile # # # # #
 # # cpu eager # # # # #
 # # cpu compile # # # # #
 # # reference eager # # # # #
 # # reference compile # # # # #""",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--modes", "hand-graph"],
            "mode must be eager or compile on cpu, got 'hand-graph' (CUDA",
        ),
        (["--modes", "eager,reduce-overhead"], "mode must be eager or compile on cpu, got 'redu"),
        (["--backends", "cpu,triton"], "backend must run batch 1, length 65 on cpu, got 'triton'"),
        (["--device", "cuda"], "device must be available, got cuda on a machine without it (use"),
        (["--device", "x"], "device must be cpu, cuda or cuda:<index>, got 'x' (use --device"),
        (
            ["--plot", "no/such/folder/out.png"],
            "plot must be in a folder that exists, got no/such",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytest.importorskip("matplotlib")
    assert main([*SMALL, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"bench: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backends", "cpu,nonsense"], "must be of auto, flash_mla, gluon, triton, cpu, refer"),
        (
            ["--modes", "fast"],
            "must be of eager, compile, reduce-overhead, hand-graph, got 'fast'",
        ),
        (["--preset", "nonsense"], "invalid choice: 'nonsense' (choose from "),
        (["--batch", "0"], "must be at least 1, got '0'"),
        (["--length", "1,x"], "must be at least 1, got 'x'"),
        (["--json", "--csv"], "not allowed with argument"),
    ],
)
def test_a_name_that_does_not_exist_is_told_without_a_traceback(options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*SMALL, *options])
    assert exit_info.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m mla_ops bench [options]"
    assert message in error


def test_a_missing_matplotlib_is_told_before_anything_is_measured(capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*SMALL, "--plot", "out.png"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: matplotlib must be importable for --plot, got import of matpl")
    assert error.endswith("(pip install matplotlib)\n")
    assert error.count("\n") == 1


def test_plot_has_a_panel_a_batch_and_a_line_a_backend(quick, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.svg"
    assert main([*SMALL, "--modes", "eager", "--plot", str(path)]) == 0
    # The SVG writer notes each text in a comment, whatever the font.
    labels = re.findall(r"<!-- (.*) -->", path.read_text())
    for label in ("batch 1", "batch 2", "cpu, eager", "reference, eager", "roof, measured", "65"):
        assert label in labels
    assert f"bench: wrote {path}" in capsys.readouterr().err


def test_plot_leaves_refused_times_out(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = copy.deepcopy(REPORT)
    for result in drawn["results"]:
        result.update(REFUSED, refused="wrong")
    plot(drawn, tmp_path / "none.png")
    plot(REPORT, tmp_path / "all.png")
    images = [(tmp_path / name).read_bytes() for name in ("none.png", "all.png")]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert images[0] != images[1]


def test_progress_is_a_bar_on_a_terminal_and_lines_without_rich(quick, capsys, monkeypatch):
    pytest.importorskip("rich")
    shape = bench.StepShape(1, 2, 3)
    cases = [(shape, "cpu", "eager"), (shape, "cpu", "compile")]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(bench._shown(cases)) == cases
    assert "bench: 1/2" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(bench._shown(cases)) == cases
    assert "bench: 2/2 batch 1 length 3 cpu compile\n" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_mode_on_cuda(capsys):
    options = ["--batch", "2", "--length", "300", "--backends", "triton,auto", "--json"]
    assert main(["bench", "--device", "cuda", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert_matches(report, BenchReport)
    times = {(r["backend"], r["mode"]): r["us"] for r in report["results"]}
    assert len(times) == 8
    # Launching 64 kernels from Python costs more than replaying them.
    for mode in ("reduce-overhead", "hand-graph"):
        assert times["triton", mode] < times["triton", "eager"]
