#!/usr/bin/env bash
# One command of the package, set-up included: demo | doctor | explain | bench.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup_env.sh >&2
exec .venv/bin/python -m mla_ops "$@"
