"""What keeps Inductor honest about operators that mutate; on by default, switchable."""

from __future__ import annotations

from mla_ops.inductor.install import enable, install, installed, uninstall
from mla_ops.ops._library import before_tracing

# mla_decode is not lowered to mla_decode_out: buffers that Inductor allocates live as long as
# those that the operator allocates itself. Peak of a step on the CPU, 3 layers of 16 heads at
# batch 4 (scripts/bench_planner.py --hidden 256 --layers 3 --batch 4 --length 64): 449,025 bytes
# either way; with memory_planning 451,073 for the operator's and 516,353 for Inductor's. On an
# H200 under reduce-overhead: 34.9 MB either way, 232 us a step for the operator's, 237 for
# Inductor's, with memory_planning 243 and 241 (scripts/results/planner_h200.json).
__all__ = ["enable", "install", "installed", "uninstall"]

before_tracing(install)
