#!/usr/bin/env bash
# The main job: a DeepSeek-style model decodes the shipped prompts, captured whole.
set -euo pipefail
exec "$(dirname "$0")/run.sh" demo "$@"
