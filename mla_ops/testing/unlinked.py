"""Tensor methods that a torch built without CUDA refuses on fake CUDA tensors.

Their Python bindings switch to the tensor's device before they dispatch; the operators behind them
do not, and trace well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDeviceGuards"]

# Typed Any: operators are not annotated.
aten: Any = torch.ops.aten


class WithoutDeviceGuards(TorchFunctionMode):
    """Routes ``copy_``, ``contiguous``, ``clone``, ``x[...]`` and ``x[...] = y`` to operators."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Dispatch to the operator where the binding would switch devices first."""
        on_cuda = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "cuda"
        replacement = _REPLACEMENTS.get(func) if on_cuda else None
        return (replacement or func)(*args, **(kwargs or {}))


def _get(tensor: Tensor, index: Any) -> Tensor:
    """Index by integers, slices, None, an ellipsis and index tensors."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        kept = sum(item is not None and item is not Ellipsis for item in items)
        items[at : at + 1] = [slice(None)] * (tensor.dim() - kept)
    dim = 0
    indices: list[Tensor | None] = []
    for item in items:
        if item is None:
            tensor = aten.unsqueeze.default(tensor, dim)
        elif isinstance(item, int | torch.SymInt) and not isinstance(item, bool):
            tensor = aten.select.int(tensor, dim, item)
            continue
        elif isinstance(item, slice):
            step = 1 if item.step is None else item.step
            if (item.start, item.stop, step) != (None, None, 1):
                tensor = aten.slice.Tensor(tensor, dim, item.start, item.stop, step)
        indices.append(item if isinstance(item, Tensor) else None)
        dim += 1
    if any(item is not None for item in indices):
        tensor = aten.index.Tensor(tensor, indices)
    return tensor


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    items = index if isinstance(index, tuple) else (index,)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if all(isinstance(item, Tensor) for item in items):
        aten.index_put_.default(tensor, list(items), value)
    else:
        aten.copy_.default(_get(tensor, index), value)


def _contiguous(
    tensor: Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    result: Tensor = aten.contiguous.default(tensor, memory_format=memory_format)
    return result


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    Tensor.copy_: aten.copy_.default,
    Tensor.clone: aten.clone.default,
    torch.clone: aten.clone.default,
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
}
