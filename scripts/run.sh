#!/usr/bin/env bash
# One command of the package, set-up included: demo | doctor | explain | bench.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
"$root/scripts/setup_env.sh" >&2
# In the caller's folder: explain imports modules from there, and bench --plot writes there.
exec "$root/.venv/bin/python" -m mla_ops "$@"
