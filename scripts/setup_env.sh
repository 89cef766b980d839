#!/usr/bin/env bash
# Creates .venv with the pinned set of constraints.txt; does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/.mla_ops_$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
[ -f "$stamp" ] && exit 0
echo "setting up .venv (torch and the test tools; a few minutes the first time)"
"${PYTHON:-python3}" -m venv .venv
# The CPU build of torch first, by its exact version: a range would pull the CUDA build.
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    "$(grep '^torch==' constraints.txt)" -c constraints.txt
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
touch "$stamp"
