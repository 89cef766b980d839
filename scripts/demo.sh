#!/usr/bin/env bash
# The main job: a DeepSeek-style model decodes the shipped prompts, captured whole.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup_env.sh
exec .venv/bin/python -m mla_ops demo "$@"
