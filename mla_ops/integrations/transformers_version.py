"""Refuse releases of transformers that cannot be served, before anything else is imported."""

from __future__ import annotations

import re

import transformers

__all__ = ["OLDEST", "require_supported"]

OLDEST = (5, 16)


def require_supported(version: str) -> None:
    """Refuse a release older than ``OLDEST``.

    Raises:
        ImportError: the release caches expanded keys and values: there is no latent to decode
            from.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ImportError(
            f"mla_ops.integrations.transformers: transformers must be >= {OLDEST[0]}.{OLDEST[1]}, "
            f"got {version}: it caches expanded keys and values instead of the latents "
            "(pip install --upgrade transformers)"
        )


require_supported(transformers.__version__)
