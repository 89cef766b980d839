"""What keeps Inductor honest about operators that mutate; on by default, switchable."""

from __future__ import annotations

from mla_ops.inductor.install import enable, install, installed, uninstall
from mla_ops.ops._library import before_tracing

__all__ = ["enable", "install", "installed", "uninstall"]

before_tracing(install)
