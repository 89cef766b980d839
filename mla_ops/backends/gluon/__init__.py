"""Hopper kernels in Gluon; this root knows their limits without triton."""

from __future__ import annotations

import torch

from mla_ops.shapes import DecodeShape

__all__ = ["unavailable", "unsupported"]


def unavailable(device: torch.device) -> list[str]:
    """Return why this backend cannot run on ``device``."""
    return ["its kernels are not part of this version (use backend='auto')"]


def unsupported(shape: DecodeShape) -> list[str]:
    """Return why this backend cannot serve a call of ``shape``."""
    return ["serves no shape yet"]
