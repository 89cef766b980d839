"""What every launcher needs: the tensor's own device, and whether the interpreter runs."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["INTERPRETED", "on_device_of"]

# Triton reads the variable when a kernel is decorated: it cannot change later.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HERE: AbstractContextManager[Any] = contextlib.nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Enter the device of ``tensor`` unless it is current already (Triton launches on that)."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)
