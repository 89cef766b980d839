"""Options that several commands have: one rule and one message each."""

from __future__ import annotations

import argparse

import torch

__all__ = ["DTYPES", "available_device", "default_device", "positive"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_device() -> str:
    """Return "cuda" where torch reaches a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def available_device(command: str, text: str) -> torch.device:
    """Parse a device and check that it is here.

    Args:
        command: the name that begins the message.
        text: such as "cpu", "cuda", "cuda:1".

    Raises:
        ValueError: no such device, with what to do.
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{command}: device must be cpu, cuda or cuda:<index>, got {text!r} "
            f"(use --device {default_device()})"
        )
    if device.type == "cpu":
        # "cpu:7" is the same CPU.
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"{command}: device must be available, got {text} on a machine without it "
            "(use --device cpu; python -m mla_ops doctor tells why)"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"{command}: device must be available, got {text} on a machine with "
            f"{torch.cuda.device_count()} GPUs (use --device cuda)"
        )
    return device


def positive(text: str) -> int:
    """Parse a number of at least 1, for ``type=`` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return int(text)
