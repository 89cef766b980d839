"""Portable Triton kernels for SM80 and newer; this root knows their limits without triton."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from mla_ops.shapes import DecodeShape

__all__ = ["unavailable", "unsupported"]


@cache
def _reasons(device_type: str, index: int | None) -> tuple[str, ...]:
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed (pip install triton)",)
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return ()
    if device_type != "cuda":
        return (f"needs a CUDA device, the tensors are on {device_type}",)
    if not torch.cuda.is_available():
        return ("torch finds no CUDA device (install a CUDA build of torch and a driver)",)
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return (f"needs compute capability 8.0 or newer, this device has {major}.{minor}",)
    return ()


def unavailable(device: torch.device) -> list[str]:
    """Return why this backend cannot run on ``device``, with what mends it."""
    return list(_reasons(device.type, device.index))


def unsupported(shape: DecodeShape) -> list[str]:
    """Return why this backend cannot serve a call of ``shape``."""
    if shape.dtype == torch.float64:
        return ["reads bfloat16, float16 and float32, q is float64"]
    return []
