"""The exception types of mla_ops; every other refusal is a plain ValueError or TypeError."""

from __future__ import annotations

__all__ = ["BackendUnavailableError", "CacheCapacityError"]


class BackendUnavailableError(RuntimeError):
    """A named backend cannot run here; the message lists every reason with its cure."""


class CacheCapacityError(RuntimeError):
    """A cache or a metadata buffer is too small; the message names the argument to raise."""
