"""Who holds a tensor: a search of what a function or module can reach by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mla_ops._torch import storage_id
from mla_ops.diagnostics.lines import member

__all__ = ["held_addresses", "held_tensors"]

# self.layers.3.attention.state.hidden is six steps.
_DEPTH = 6
_MAX_ITEMS = 1000


def held_tensors(fn: Callable[..., Any]) -> dict[int, str]:
    """Map the storages that ``fn`` reaches between calls to the name it has for them.

    Looked at: the module or object ``fn`` is or belongs to, what its closure holds, the globals
    it names. Parameters and buffers have the first word, views of one storage the first name.
    """
    found: dict[int, str] = {}
    for name, value in _roots(fn):
        for path, tensor in _walk(name, value, _DEPTH, {}):
            found.setdefault(storage_id(tensor), path)
    return found


def held_addresses(fn: Callable[..., Any]) -> dict[str, int]:
    """Map the names ``fn`` has for tensors to their addresses; of a module all, at any depth."""
    found: dict[str, int] = {}
    for name, value in _roots(fn):
        tensors = dict(_walk(name, value, _DEPTH, {}))
        if isinstance(value, nn.Module):
            registered = (*value.named_parameters(), *value.named_buffers())
            tensors |= {name + "".join(map(member, path.split("."))): t for path, t in registered}
        found |= {path: tensor.data_ptr() for path, tensor in tensors.items()}
    return found


def _roots(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, nn.Module):
        yield "self", fn
        fn = fn.forward
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield "self", owner
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        yield from names.nonlocals.items()
        yield from names.globals.items()


def _walk(path: str, value: Any, depth: int, seen: dict[int, int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if inspect.ismodule(value) or isinstance(value, type):
        return
    # Met before, but further from the root: less of it was looked at.
    if depth <= seen.get(id(value), 0):
        return
    seen[id(value)] = depth
    for name, item in _items(path, value):
        yield from _walk(name, item, depth - 1, seen)


def _items(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for registered in (value._parameters, value._buffers, value._modules):
            yield from ((path + member(name), item) for name, item in registered.items())
    if isinstance(value, Mapping):
        pairs = list(value.items())[:_MAX_ITEMS]
        yield from ((f"{path}[{key!r}]", item) for key, item in pairs)
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value[:_MAX_ITEMS]))
    elif not isinstance(value, torch.dtype | str | bytes):
        attributes = getattr(value, "__dict__", {})
        yield from (
            (f"{path}.{name}", item) for name, item in list(attributes.items())[:_MAX_ITEMS]
        )
