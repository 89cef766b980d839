"""Private torch names, with the other _torch modules; mla_ops.inductor extends Inductor.

Each function says what it answers when the private name is gone, so that a new torch release
degrades to "unknown" instead of failing at import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

__all__ = [
    "below_autograd",
    "bound_call",
    "current_device",
    "functional_base",
    "functionalization_mode",
    "inside_graph",
    "layout_guard",
    "mark_static_address",
    "on_device_of",
    "same_schema",
    "storage_id",
    "streaming_multiprocessors",
]

# H100 and H200 SXM; what a CPU and a fake CUDA tensor without a driver pretend to be.
DEFAULT_STREAMING_MULTIPROCESSORS = 132

_HERE: AbstractContextManager[Any] = contextlib.nullcontext()
# torch.cuda.current_device() first asks whether this process was forked, which takes as long as
# the rest of an eager call's checks. -1 where the name is gone: every call then enters its device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_BelowAutograd = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


def below_autograd() -> AbstractContextManager[Any]:
    """Enter the dispatch keys below autograd (a no-op context when torch lost the guard)."""
    return contextlib.nullcontext() if _BelowAutograd is None else _BelowAutograd()


def bound_call(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the C++ function that calling an operator runs, which saves a Python frame.

    ``op`` itself where torch hides it, or where it is none.
    """
    call: Callable[..., Any] = getattr(op, "_op", op)
    return call


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Enter the device of ``tensor`` unless it is current; its current stream comes with it."""
    index = tensor.get_device()
    return _HERE if index < 0 or index == current_device() else torch.cuda.device(index)


def storage_id(tensor: torch.Tensor) -> int:
    """Return an identity of the storage that holds even for fake tensors (data_ptr is 0 there)."""
    return int(tensor.untyped_storage()._cdata)


def same_schema(op: Any, schema: str) -> bool:
    """Tell whether ``op`` was defined with ``schema``; True when torch cannot parse one."""
    parse = getattr(torch._C, "parse_schema", None)
    return parse is None or bool(op._schema == parse(schema))


def functionalization_mode() -> type | None:
    """Return the mode in which AOTAutograd traces mutating operators, None when torch lost it."""
    try:
        from torch._subclasses.functional_tensor import FunctionalTensorMode
    except ImportError:
        return None
    return FunctionalTensorMode


def functional_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the graph input or value that a traced view is taken from, None if it is no view."""
    attribute = "_inference_mode_base" if torch.is_inference_mode_enabled() else "_base"
    base: torch.Tensor | None = getattr(tensor, attribute, None)
    return base


def mark_static_address(tensor: torch.Tensor) -> None:
    """Promise torch.compile that ``tensor`` keeps its address, so CUDA graphs accept mutation."""
    torch._dynamo.mark_static_address(tensor)


def inside_graph() -> str | None:
    """Name the kind of graph being recorded right now, or None outside any."""
    if torch.compiler.is_compiling():
        return "a torch.compile region"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph capture"
    return None


def layout_guard(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """Return a check that as many others are laid out like these; None when torch has none.

    One call into C++ instead of thirty reads of attributes from Python. It may refuse more than
    shapes, strides, dtypes and devices ask for: classes, requires_grad, the mode of autograd.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    tensor_guards = getattr(guards, "TensorGuards", None)
    if tensor_guards is None or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    check: Callable[..., bool] = tensor_guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


# torch.cuda.is_available() asks the driver on every call.
@cache
def _multiprocessors(device_type: str, index: int | None) -> int:
    if device_type != "cuda" or not torch.cuda.is_available():
        return DEFAULT_STREAMING_MULTIPROCESSORS
    return torch.cuda.get_device_properties(index).multi_processor_count


def streaming_multiprocessors(device: torch.device) -> int:
    """Count the SMs of ``device``: its own on CUDA, 132 on CPU and on fake CUDA tensors."""
    index = device.index
    if device.type == "cuda" and index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _multiprocessors(device.type, index)


# What torch.compiler.assume_constant_result sets; to call it would import Dynamo with mla_ops.
# Without it Dynamo traces into the cached function, and warns.
streaming_multiprocessors._dynamo_marked_constant = True  # type: ignore[attr-defined]
