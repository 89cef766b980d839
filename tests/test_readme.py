"""What the README shows is run, and what it claims about support is generated."""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import speed_table

from mla_ops.__main__ import COMMANDS, main
from mla_ops.testing.support import support_matrix

README = Path(__file__).parents[1] / "README.md"


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    # Later blocks go on from earlier ones, as a reader would.
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "readme.py"
        program.write_text("\n".join(blocks))
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_explain_takes_the_factory_shown(tmp_path, monkeypatch, capsys):
    """Symptom: what to write for package.module:factory was told by --help alone."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if block.startswith("def factory()"))
    definition, _ = block.split("model, args")
    (tmp_path / "shown_factory.py").write_text(f"import torch\n\n{definition}")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["explain", "shown_factory:factory", "--strict"]) == 0
    assert capsys.readouterr().out.startswith("explain: nothing found")
    assert len(block.splitlines()) == 4


def test_support_matrix_is_the_generated_one():
    begin, end = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"
    shown = README.read_text().split(begin)[1].split(end)[0].strip()
    assert shown == support_matrix(), "run scripts/support_matrix.py --write"


def test_times_are_those_of_the_results():
    shown = README.read_text().split(speed_table.BEGIN)[1].split(speed_table.END)[0].strip()
    assert shown == speed_table.speed_table(), "run scripts/speed_table.py --write"


def test_code_comes_by_line_10_and_the_two_commands_follow():
    lines = README.read_text().splitlines()
    assert "```python" in lines[:10]
    assert any("./scripts/demo.sh" in line for line in lines[:28])
    assert any("./scripts/test.sh" in line for line in lines[:28])


def test_commands_exist_with_the_options_shown(capsys):
    lines = re.findall(r"^\./scripts/run\.sh (.*?) *(?:#.*)?$", README.read_text(), re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    assert {command[0] for command in commands} == set(COMMANDS) - {"demo"}
    for command in commands:
        with pytest.raises(SystemExit) as exit_info:
            main([*command, "--help"])
        assert exit_info.value.code == 0, capsys.readouterr().err
