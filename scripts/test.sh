#!/usr/bin/env bash
# Format, lint, types, import layers and tests, on any machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH" TORCHINDUCTOR_COMPILE_THREADS=1
ruff format --check .
ruff check .
mypy
lint-imports
# One thread a worker: the workers already fill the cores.
OMP_NUM_THREADS=1 python -m pytest -n "${TEST_WORKERS:-2}" -q --durations=15 "$@"
