"""Run the tests that read torch's insides on several releases, an environment for each.

python scripts/sweep_torch.py                       # oldest and newest served
python scripts/sweep_torch.py 2.12.1 -- -k canaries # arguments after -- go to pytest
python scripts/sweep_torch.py --python other/bin/python
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from tempfile import gettempdir

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("2.11.0", "2.14.1")
TESTS = ("tests/diagnostics", "tests/inductor", "tests/cli")
TOOLS = ("numpy", "transformers", "rich", "matplotlib", "pytest", "hypothesis", "expecttest")
# What a release of torch brings or needs in a version of its own.
UNPINNED = ("torch", "triton")


def constraints() -> str:
    """Return the pinned versions without those that depend on torch's."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0] not in UNPINNED) + "\n"


def install(release: str, folder: Path) -> Path:
    """Return the Python of an environment with one release, made if it is not there."""
    python, pins, done = folder / "bin" / "python", folder / "constraints.txt", folder / "complete"
    wanted = constraints()
    if done.exists() and done.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    pins.write_text(wanted)
    # The CPU build where pip's index has one under a name of its own.
    if pip(python, pins, f"torch=={release}+cpu").returncode:
        pip(python, pins, f"torch=={release}").check_returncode()
    # The CPU build asks for no Triton; the one that another build asked for stays.
    pip(python, pins, "triton", *TOOLS).check_returncode()
    done.write_text(wanted)
    return python


def pip(python: Path, pins: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return run([*command, "-c", str(pins), *packages])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, which is importable, with one thread a process."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=threads | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


def release_of(python: Path) -> str:
    found = run([str(python), "-c", "import torch; print(torch.__version__)"])
    found.check_returncode()
    return found.stdout.strip()


def test(python: Path, options: list[str]) -> tuple[str, bool]:
    """Run the tests; return pytest's last line and whether all is well."""
    found = run([str(python), "-m", "pytest", "-q", "-p", "no:logging", *TESTS, *options])
    lines = found.stdout.strip().splitlines() or found.stderr.strip().splitlines() or ["no word"]
    if found.returncode:
        told = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        print("\n".join(told) or found.stderr[-2000:], file=sys.stderr, flush=True)
    return lines[-1], found.returncode == 0


def sweep(release: str | None, python: Path | None, folder: Path, options: list[str]) -> bool:
    """Print one line on one release; return whether its tests passed."""
    start = time.monotonic()
    try:
        if python is None:
            python = install(str(release), folder / str(release))
        name = release_of(python)
        line, passed = test(python, options)
    except (OSError, subprocess.CalledProcessError) as error:
        name, passed = str(release or python), False
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        line = f"not installed: {told[-1]}"
    mark = "ok" if passed else "FAILED"
    print(f"torch {name}: {mark}: {line} ({time.monotonic() - start:.0f} s in all)", flush=True)
    return passed


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", help=f"default: {' '.join(RELEASES)}")
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="an interpreter that has torch and the tools, in place of a release; repeatable",
    )
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "mla_ops_sweep_torch")
    args = parser.parse_args(arguments[:split])
    releases = args.releases or ([] if args.python else RELEASES)
    targets = [(None, python.absolute()) for python in args.python]
    targets += [(release, None) for release in releases]
    passed = [sweep(*target, args.folder, arguments[split + 1 :]) for target in targets]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
