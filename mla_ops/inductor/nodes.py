"""Questions about one node of a graph: its name, size, memory and line, and what it mutates."""

from __future__ import annotations

import math
import operator
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

__all__ = [
    "COPYING",
    "Size",
    "is_mutation",
    "is_view",
    "mutated_bases",
    "operator_name",
    "root_of",
    "size_hint",
    "size_of",
    "user_frame",
    "user_line",
]

# Names of operators whose whole result comes from one input of the same size, up to a few rows.
COPYING = frozenset(
    (
        *(
            "aten.clone",
            "aten.copy",
            "aten._to_copy",
            "aten.contiguous",
            "aten.cat",
            "aten.repeat",
        ),
        *("aten.index_put", "aten._unsafe_index_put", "aten.index_copy", "aten.index_add"),
        *("aten.index_fill", "aten.scatter", "aten.scatter_add", "aten.scatter_reduce"),
        *("aten.masked_scatter", "aten.slice_scatter", "aten.select_scatter"),
        *("aten.as_strided_scatter", "aten.diagonal_scatter"),
        *("prims.convert_element_type", "prims.clone", "mla_ops.snapshot"),
    )
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Code that the user did not write: torch, this package, and Python's own library.
_FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep,
    str(Path(__file__).resolve().parent.parent) + os.sep,
)
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")


class Size(NamedTuple):
    """Elements of a buffer and bytes of each."""

    numel: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * self.itemsize


def operator_name(target: Any) -> str:
    """Name an operator as ``namespace.name``; its overload is left out."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket).replace("::", ".")
    return str(getattr(target, "__name__", target))


def size_of(value: Any) -> Size | None:
    """Measure a (fake) tensor, symbolic sizes by the sizes it was traced with."""
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [size_hint(size) for size in value.shape]
    if any(size is None for size in sizes):
        return None
    return Size(math.prod(size for size in sizes if size is not None), value.element_size())


def size_hint(size: Any) -> int | None:
    """Return the value a size was traced with, None when it is unknown."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None) if isinstance(size, torch.SymInt) else None
    return None if hint is None else int(hint)


def is_mutation(node: fx.Node) -> bool:
    """Tell whether ``node`` is the functional form of an operator of ours that mutates."""
    if node.op != "call_function" or "auto_functionalized" not in str(node.target):
        return False
    mutating = node.args[0] if node.args else None
    return getattr(mutating, "namespace", None) == "mla_ops"


def mutated_bases(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the functionalised call mutates, of either protocol."""
    bases: Any = node.kwargs.get("_all_bases")
    if bases is None:
        mutating: Any = node.args[0]
        bases = [
            node.kwargs.get(argument.name)
            for argument in mutating._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    return [base for base in bases if isinstance(base, fx.Node)]


def root_of(node: fx.Node) -> fx.Node:
    """Follow views to the node whose memory they are."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Tell whether a node's result lies in the memory of its first argument.

    The results of ``unbind`` and ``split`` are views too: a list, and the items taken of it.
    """
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return is_view(node.args[0])
    if not isinstance(target, torch._ops.OpOverload):
        return False
    infos = [result.alias_info for result in target._schema.returns]
    aliases = any(info is not None and not info.is_write for info in infos)
    return aliases or target._schema.name == "aten::reshape"


def user_frame(frames: Sequence[tuple[str, int]]) -> str | None:
    """Return "file:line" of the innermost frame outside torch, this package and Python's library.

    Args:
        frames: (file, line), the innermost last. Where all are inside, the innermost is told; of
            Dynamo's own none, which say nothing.
    """
    own = [frame for frame in frames if not _is_foreign(frame[0])]
    told = own or [frame for frame in frames if not frame[0].startswith(_DYNAMO)]
    return "{}:{}".format(*told[-1]) if told else None


def _is_foreign(file: str) -> bool:
    """Tell whether a file is not the user's; other installed packages are."""
    if file.startswith(_STANDARD):
        installed = file.removeprefix(_STANDARD).startswith(_INSTALLED)
        return not installed or file.startswith(_FOREIGN)
    return file.startswith(("<frozen", *_FOREIGN))


def user_line(stack_trace: str | None) -> str | None:
    """Return the user's "file:line" in a stack trace printed by Python; None if it has none."""
    return user_frame([(file, int(line)) for file, line in _FRAME.findall(stack_trace or "")])
