"""The one torch.library.Library of the package, and what every operator shares at registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_ops._torch import (
    below_autograd,
    functional_base,
    functionalization_mode,
    same_schema,
    storage_id,
)
from mla_ops.shapes import packed_extent

__all__ = ["LIBRARY", "before_tracing", "refuse_shared_memory", "register"]

LIBRARY = torch.library.Library("mla_ops", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_prepare_tracing: Callable[[], bool] = lambda: False  # noqa: E731


def before_tracing(prepare: Callable[[], bool]) -> None:
    """Have ``prepare`` called whenever a mutating operator is traced (it must be idempotent).

    It answers whether symbolic storage offsets survive compilation.
    """
    global _prepare_tracing
    _prepare_tracing = prepare


def register(schema: str, *, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the operator ``schema`` with its kernel, fake and gradient refusal.

    A second copy of the package in one process (a reload, another path) finds the operator
    defined already and shares the first copy's registration when the schemas agree.

    Args:
        schema: ``name(arguments) -> returns`` without a namespace.
        kernel: implementation for every device; chooses a backend at launch.
        fake: shape function, exact in shape, dtype, stride and device.

    Returns:
        The operator's default overload.

    Raises:
        ImportError: another version of the operator is loaded in this process.
    """
    name = schema.partition("(")[0]
    packet = getattr(torch.ops.mla_ops, name, None)
    if packet is not None:
        if not same_schema(packet.default, f"mla_ops::{schema}"):
            raise ImportError(
                f"{name}: operator must be defined once, got another schema "
                f"{packet.default._schema} (two versions of mla_ops are loaded: keep one)"
            )
        return packet.default
    LIBRARY.define(schema, tags=_TAGS)
    op = getattr(torch.ops.mla_ops, name).default
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    LIBRARY.impl(name, _refuse_gradient(name, op), "Autograd")
    written = [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.is_write
    ]
    torch.library.register_fake(
        f"mla_ops::{name}", _traced(name, written, fake) if written else fake, lib=LIBRARY
    )
    mode = functionalization_mode()
    if written and mode is not None:
        rule = _refuse_lost_view(name, written)
        torch.library.register_torch_dispatch(f"mla_ops::{name}", mode, rule, lib=LIBRARY)
    return op


def _refuse_lost_view(name: str, written: list[tuple[int, str]]) -> Callable[..., Any]:
    """Refuse a view whose place torch would lose when it functionalises the operator.

    auto_functionalized_v2 (seen on torch 2.11 and 2.13, every AOT backend) notes a view by its
    absolute storage offset and replays it on a base that begins there already: the write lands
    as far behind its place as the base lies in its storage, silently.
    """

    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        for position, argument in written:
            tensor = args[position] if position < len(args) else kwargs[argument]
            base = functional_base(tensor)
            if base is None or base.storage_offset() == 0:
                continue
            if tensor.shape == base.shape and tensor.stride() == base.stride():
                continue
            raise ValueError(
                f"{name}: {argument} must be a whole input or a view of one with storage offset "
                f"0, got a view taken inside the compiled region of a tensor with storage offset "
                f"{base.storage_offset()} (take the view outside the region)"
            )
        return mode.__torch_dispatch__(func, types, args, kwargs or {})

    return rule


def _traced(
    name: str, written: list[tuple[int, str]], fake: Callable[..., Any]
) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        offsets_survive = _prepare_tracing()
        for position, argument in written:
            tensor = args[position] if position < len(args) else kwargs[argument]
            if not offsets_survive and isinstance(tensor.storage_offset(), torch.SymInt):
                raise ValueError(
                    f"{name}: {argument} must be without a symbolic storage offset while the "
                    f"Inductor pass is off, got offset {tensor.storage_offset()} (take the view "
                    "outside the compiled region, or unset MLA_OPS_INDUCTOR_PASS)"
                )
        return fake(*args, **kwargs)

    return traced


def _refuse_gradient(name: str, op: Any) -> Callable[..., Any]:
    def refuse_gradient(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, torch.Tensor) and argument.requires_grad:
                    raise RuntimeError(
                        f"{name}: inputs must be without gradient, got requires_grad=True "
                        "(mla_ops is inference only: call it under torch.no_grad() or "
                        "torch.inference_mode())"
                    )
        with below_autograd():
            return op(*args, **kwargs)

    return refuse_gradient


def refuse_shared_memory(
    op: str,
    written: Sequence[tuple[str, torch.Tensor]],
    read: Sequence[tuple[str, torch.Tensor | None]],
    *,
    traced: bool,
) -> None:
    """Refuse a written tensor that shares memory with another argument or with itself.

    Traced (fake) tensors have no addresses, so there a shared storage is refused; real ones are
    compared by byte range, because Inductor's memory planner may put two legal buffers into one
    storage. Empty tensors are exempt.
    """
    for position, (name, tensor) in enumerate(written):
        if tensor.numel() == 0:
            continue
        if not tensor.is_contiguous() and _overlaps_itself(tensor):
            raise ValueError(
                f"{op}: {name} must be without overlapping elements, got strides "
                f"{tuple(tensor.stride())} for shape {tuple(tensor.shape)} "
                "(an expanded tensor cannot be written: pass a real buffer)"
            )
        share = _shares_storage(tensor) if traced else _shares_bytes(tensor)
        for other_name, other in (*written[position + 1 :], *read):
            if other is not None and other.numel() > 0 and share(other):
                raise ValueError(
                    f"{op}: {name} must be in memory of its own, got memory shared with "
                    f"{other_name} (allocate {name} separately)"
                )


def _shares_storage(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    storage = storage_id(tensor)
    return lambda other: storage_id(other) == storage


def _shares_bytes(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    start = tensor.data_ptr()
    end = start + packed_extent(tensor) * tensor.element_size()
    device = tensor.device

    def share(other: torch.Tensor) -> bool:
        begin = other.data_ptr()
        if begin >= end or other.device != device:
            return False
        return begin + packed_extent(other) * other.element_size() > start

    return share


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False
