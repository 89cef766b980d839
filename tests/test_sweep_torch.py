"""scripts/sweep_torch.py with interpreters of two lines: its verdict is pytest's."""

import sys

import pytest
import sweep_torch


def interpreter(folder, release, script):
    """Write what answers like a Python that has ``release`` and runs pytest as ``script``."""
    path = folder / f"python{release}"
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {release} && exit\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_a_line_for_each_release_and_one_failure_fails_all(tmp_path, capsys):
    good = interpreter(tmp_path, "2.98.0", 'echo "$@"; echo 7 passed')
    bad = interpreter(tmp_path, "2.99.0", "echo FAILED tests/x.py::test_y; echo 1 failed; exit 1")
    assert sweep_torch.main(["--python", good]) == 0
    assert sweep_torch.main(["--python", bad, "--python", good]) == 1
    shown = capsys.readouterr()
    lines = [line.partition(" (")[0] for line in shown.out.splitlines()]
    assert lines == [
        "torch 2.98.0: ok: 7 passed",
        "torch 2.99.0: FAILED: 1 failed",
        "torch 2.98.0: ok: 7 passed",
    ]
    assert shown.err == "FAILED tests/x.py::test_y\n"


def test_what_follows_two_dashes_goes_to_pytest(tmp_path, capsys):
    echo = interpreter(tmp_path, "2.98.0", 'echo "$@"')
    assert sweep_torch.main(["--python", echo, "--", "-k", "a or b", "--slow"]) == 0
    expected = "-m pytest -q -p no:logging tests/diagnostics tests/inductor tests/cli -k a or b"
    assert f"torch 2.98.0: ok: {expected} --slow (" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$"])
def test_no_output_is_no_success(script, tmp_path, capsys):
    broken = interpreter(tmp_path, "2.98.0", script)
    assert sweep_torch.main(["--python", broken]) == 1
    assert "torch 2.98.0: FAILED: no word" in capsys.readouterr().out


def test_an_environment_that_cannot_be_made_fails_and_the_next_is_tried(
    tmp_path, capsys, monkeypatch
):
    def create(folder, **options):
        folder.joinpath("bin").mkdir(parents=True)
        interpreter(folder / "bin", "", "echo no such release >&2; exit 1")

    monkeypatch.setattr(sweep_torch.venv, "create", create)
    assert sweep_torch.main(["9.8.0", "9.9.0", "--folder", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        "torch 9.8.0: FAILED: not installed: no such release",
        "torch 9.9.0: FAILED: not installed: no such release",
    ]


def test_an_interpreter_that_is_not_there_is_told(tmp_path, capsys):
    assert sweep_torch.main(["--python", str(tmp_path / "none")]) == 1
    assert "none: FAILED: not installed: " in capsys.readouterr().out


def test_pins_of_the_environment_leave_torch_and_triton_out():
    names = {line.partition("==")[0] for line in sweep_torch.constraints().splitlines()}
    assert set(sweep_torch.TOOLS) <= names
    assert not names & {"torch", "triton"}


def test_defaults_are_the_oldest_and_the_newest_release(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(sweep_torch, "sweep", lambda release, *_: seen.append(release) or True)
    assert sweep_torch.main([]) == 0
    assert seen == ["2.11.0", "2.14.1"]
    monkeypatch.setattr(sys, "argv", ["sweep_torch.py", "2.12.0"])
    assert sweep_torch.main() == 0
    assert seen[2:] == ["2.12.0"]
