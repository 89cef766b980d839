"""Source lines of the user's own code, and the names that code has for tensors."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from mla_ops.inductor.nodes import user_frame, user_line

__all__ = [
    "argument_names",
    "is_outer",
    "member",
    "readable_name",
    "shown_line",
    "user_frame",
    "user_line",
]

# How Dynamo spells locals and globals, and what registers tensors and modules by name.
_SPELLED = re.compile(r"\b[LG]\['(\w+)'\]")
_REGISTERED = re.compile(r"\._(?:parameters|buffers|modules)\['([^']+)'\]")


def readable_name(source: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Write Dynamo's name of a value as the user would: L['self']._buffers['kv'] is self.kv.

    Args:
        source: Dynamo's name, or a text with such names.
        names: ``argument_names``, for a value of the outer function.
    """
    text = _REGISTERED.sub(lambda match: member(match[1]), _SPELLED.sub(r"\1", source))
    for dynamo, name in names.items():
        text = re.sub(rf"(?<![\w.]){re.escape(dynamo)}", name, text)
    return text


def argument_names(fn: Callable[..., Any]) -> dict[str, str]:
    """Map args[0] and kwargs['kv'] to the names in the signature of ``fn``.

    Dynamo sees only those where a function is wrapped: a partial, a decorator, a callable object.
    """
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):
        return {}
    parameters = signature.parameters.values()
    own = {each.name for each in parameters}
    positional = [
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    found: dict[str, str] = {}
    # Where the function has an argument of that name, Dynamo's name is already the user's.
    if "args" not in own:
        found |= {f"args[{index}]": name for index, name in enumerate(positional)}
    if "kwargs" not in own:
        found |= {f"kwargs['{name}']": name for name in own}
    return found


def is_outer(compile_id: str) -> bool:
    """Tell whether a compilation is one of the function that was compiled, called first."""
    return compile_id.partition("/")[0] == "0"


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
