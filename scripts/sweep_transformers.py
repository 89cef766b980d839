"""Run the transformers tests against several releases, each installed beside the environment.

python scripts/sweep_transformers.py            # oldest served, one between, newest
python scripts/sweep_transformers.py 5.17.0
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("5.16.0", "5.17.0", "5.20.0", "newest")
# What releases before 5.24 need in another version than the newest one.
COMPANIONS = ("huggingface_hub<2", "httpx", "httpcore", "h11", "anyio", "certifi", "idna")


def install(release: str, target: Path) -> None:
    """Install one release without its dependencies, which the environment has."""
    wanted = "transformers" if release == "newest" else f"transformers=={release}"
    packages = [wanted] if release == "newest" else [wanted, *COMPANIONS]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(target), *packages], check=True)


def test(target: Path) -> str:
    """Run the tests against what ``target`` holds; return pytest's last line."""
    paths = (str(target), str(ROOT), os.environ.get("PYTHONPATH", ""))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:logging", "tests/integrations"]
    found = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        print(found.stdout[-4000:], found.stderr[-2000:])
    return found.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "mla_ops_sweep")
    args = parser.parse_args()
    worst = 0
    for release in args.releases:
        target = args.folder / release
        if not target.exists():
            install(release, target)
        line = test(target)
        worst |= "failed" in line or "error" in line or "passed" not in line
        print(f"transformers {release}: {line}", flush=True)
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
