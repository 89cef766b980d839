"""Source lines of the user's own code, and the names that code has for tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["member", "readable_name", "shown_line", "user_frame", "user_line"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Code that the user did not write: torch, and this package.
_FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep,
    str(Path(__file__).resolve().parent.parent) + os.sep,
)
# How Dynamo spells locals and globals, and what registers tensors and modules by name.
_SPELLED = re.compile(r"\b[LG]\['(\w+)'\]")
_REGISTERED = re.compile(r"\._(?:parameters|buffers|modules)\['([^']+)'\]")


def user_frame(frames: Sequence[tuple[str, int]]) -> str | None:
    """Return "file:line" of the innermost frame outside torch and this package.

    Args:
        frames: (file, line), the innermost last. Where all are inside, the innermost is told.
    """
    if not frames:
        return None
    own = [frame for frame in frames if not frame[0].startswith(_FOREIGN)]
    file, line = (own or frames)[-1]
    return f"{file}:{line}"


def user_line(stack_trace: str | None) -> str | None:
    """Return the user's "file:line" in a stack trace printed by Python; None if it has none."""
    return user_frame([(file, int(line)) for file, line in _FRAME.findall(stack_trace or "")])


def readable_name(source: str) -> str:
    """Write Dynamo's name of a value as the user would: L['self']._buffers['kv'] is self.kv."""
    return _REGISTERED.sub(lambda match: member(match[1]), _SPELLED.sub(r"\1", source))


def member(name: str) -> str:
    """Write the access to what a module registered: .kv, and [0] in a list of layers."""
    return f"[{name}]" if name.isdigit() else f".{name}"


def shown_line(where: str | None) -> str:
    """Write "file:line" relative to the current folder where that is shorter; "" for None."""
    if where is None:
        return ""
    file, _, line = where.rpartition(":")
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{min(file, relative, key=len)}:{line}"
