"""Source lines of the user's own code, and the names that code has for tensors."""

from __future__ import annotations

import os
import re

from mla_ops.inductor.nodes import user_frame, user_line

__all__ = ["member", "readable_name", "shown_line", "user_frame", "user_line"]

# How Dynamo spells locals and globals, and what registers tensors and modules by name.
_SPELLED = re.compile(r"\b[LG]\['(\w+)'\]")
_REGISTERED = re.compile(r"\._(?:parameters|buffers|modules)\['([^']+)'\]")


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
