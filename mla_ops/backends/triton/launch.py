"""Whether the interpreter runs the kernels, which every launcher has to know."""

from __future__ import annotations

import os

__all__ = ["INTERPRETED"]

# Triton reads the variable when a kernel is decorated: it cannot change later.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
