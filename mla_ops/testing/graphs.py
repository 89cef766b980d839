"""Short, stable text of the graph Inductor would lower, for golden tests on any machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from mla_ops._torch_compile import aot_inference_graph, fresh_fake_mode, inductor_passes
from mla_ops.diagnostics.copies import COPYING, graph_copies, operator_name
from mla_ops.testing.unlinked import WithoutDeviceGuards

__all__ = ["graph_text"]

_TORCH_NAMESPACES = ("aten", "prims", "prim", "inductor", "higher_order", "_c10d_functional")
# Views by another name: post-grad passes write reshape for every view.
_VIEWS = ("aten.reshape", "aten._unsafe_view", "aten.lift_fresh_copy")


def graph_text(
    fn: Callable[..., Any],
    *args: Any,
    device: torch.device | str | None = None,
    big_bytes: int = 1 << 20,
) -> str:
    """Trace ``fn`` without running it and list its operators, one a line.

    The graph is what AOTAutograd and Inductor's passes make of ``fn``; aten operators are left
    out, because they differ between torch releases. A tensor is written as the argument it is (a
    view of), ``%3`` for the result of line 3, or what made it; the last line counts copies of big
    buffers. ``device="cuda"`` traces for CUDA on a machine without one.

    Args:
        fn: function or module; tensors of the modules it gets as arguments are arguments, too.
        *args: its arguments, real or fake tensors; nothing is computed and nothing written.
        device: trace as if every tensor were there; None keeps their devices.
        big_bytes: from how many bytes on a copied buffer is counted.

    Returns:
        str: for example::

            mla_ops.append_kv_(kv_cache=kv_cache, kv_c=kv_c, k_pe=k_pe, slot_mapping=slots)
            %1 = mla_ops.mla_decode(q=q, kv_cache=kv_cache, ...)
            big copies: 0
    """
    call = _Call(fn, args)
    tensors = list(call.tensors.values())
    fake_mode = fresh_fake_mode(tensors)
    with torch.no_grad(), _guards_off():
        inputs = [_fake(tensor, fake_mode, device) for tensor in tensors]
        graph_module = inductor_passes(aot_inference_graph(call, inputs))
    writer = _Writer(graph_module.graph, list(call.tensors))
    copies = graph_copies(graph_module.graph, big_bytes)
    return "\n".join([*writer.lines, f"big copies: {len(copies)}"])


class _Call(nn.Module):
    """``fn`` as a module of nothing but tensor arguments, named for the reader."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        leaves, self._spec = pytree.tree_flatten(args)
        names = _leaf_names(fn, args)
        holder = _Holder(
            fn if isinstance(fn, nn.Module) else None, dict(zip(names, leaves, strict=True))
        )
        # In a tuple: registered, its tensors would be inputs twice.
        self._hidden = (fn, leaves, holder)
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._state_names = [name for name, _ in holder.state()]
        self.tensors = {names[i]: leaves[i] for i in self._positions}
        self.tensors.update({_readable(name): tensor for name, tensor in holder.state()})

    def forward(self, *values: Tensor) -> Any:
        fn, leaves, holder = self._hidden
        leaves = list(leaves)
        for position, value in zip(self._positions, values, strict=False):
            leaves[position] = value
        arguments = pytree.tree_unflatten(leaves, self._spec)
        state = dict(zip(self._state_names, values[len(self._positions) :], strict=True))
        result = torch.func.functional_call(holder, state, (lambda: fn(*arguments),))
        return pytree.tree_leaves(result)


class _Holder(nn.Module):
    """Holds the modules that take part, so that their tensors can be swapped for a call."""

    def __init__(self, fn: nn.Module | None, arguments: dict[str, Any]) -> None:
        super().__init__()
        if fn is not None:
            self.add_module("self", fn)
        for name, value in arguments.items():
            if isinstance(value, nn.Module):
                self.add_module(name.replace(".", "_"), value)

    def state(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def _guards_off() -> AbstractContextManager[Any]:
    return nullcontext() if torch.backends.cuda.is_built() else WithoutDeviceGuards()


def _leaf_names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Name every leaf of ``args`` by parameter and, inside containers, by key."""
    called = fn.forward if isinstance(fn, nn.Module) else fn
    parameters = list(inspect.signature(called).parameters.values())
    names = []
    for path, _ in pytree.tree_flatten_with_path(args)[0]:
        assert isinstance(path[0], pytree.SequenceKey)
        position = path[0].idx
        last = parameters[min(position, len(parameters) - 1)]
        name = last.name
        if last.kind is inspect.Parameter.VAR_POSITIONAL:
            name = f"{name}[{position - parameters.index(last)}]"
        names.append(name + pytree.keystr(path[1:]).replace("['", "[").replace("']", "]"))
    return names


def _readable(state_name: str) -> str:
    return state_name.removeprefix("self.")


def _fake(tensor: Tensor, fake_mode: Any, device: torch.device | str | None) -> Tensor:
    device = tensor.device if device is None else torch.device(device)
    with fake_mode:
        if isinstance(tensor, torch._subclasses.FakeTensor) and tensor.device == device:
            return tensor
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )


class _Writer:
    def __init__(self, graph: fx.Graph, input_names: list[str]) -> None:
        self.lines: list[str] = []
        self._labels: dict[fx.Node, str] = {}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._labels.update(zip(placeholders, input_names, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        name = operator_name(node.target)
        tensors = [source for source in node.all_input_nodes if source in self._labels]
        if isinstance(node.target, torch._ops.OpOverload) and not name.startswith(
            tuple(f"{namespace}." for namespace in _TORCH_NAMESPACES)
        ):
            returns = bool(node.target._schema.returns)
            label = f"%{len(self.lines) + 1}"
            text = f"{name}({self._arguments(node)})"
            self.lines.append(f"{label} = {text}" if returns else text)
            self._labels[node] = label
        elif name == "getitem" and tensors:
            self._labels[node] = f"{self._labels[tensors[0]]}[{node.args[1]}]"
        elif tensors and self._shows_source(node, name):
            self._labels[node] = self._labels[tensors[0]]
        elif name in COPYING and tensors:
            verb = "updated" if "scatter" in name or name == "aten.copy" else "copy of"
            self._labels[node] = f"{verb} {self._labels[tensors[0]]}"
        else:
            self._labels[node] = f"<{'computed' if node.all_input_nodes else 'new'}>"

    def _shows_source(self, node: fx.Node, name: str) -> bool:
        """Tell whether a node is its first tensor: a view of it or a write into it."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        aliases = any(result.alias_info is not None for result in target._schema.returns)
        return aliases or name in _VIEWS

    def _arguments(self, node: fx.Node) -> str:
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
        given.update(node.kwargs)
        defaults = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
        shown = []
        for name, value in given.items():
            if not isinstance(value, fx.Node) and name in defaults and defaults[name] == value:
                continue
            shown.append(f"{name}={self._show(value)}")
        return ", ".join(shown)

    def _show(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._labels.get(value, "<computed>")
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._show, value))}]"
        return repr(value)
