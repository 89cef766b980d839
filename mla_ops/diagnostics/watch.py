"""A backend for torch.compile that is Inductor and watches what each graph is given and gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mla_ops import _torch_graphs as private
from mla_ops._torch import storage_id
from mla_ops.diagnostics.copies import operator_name
from mla_ops.diagnostics.lines import is_outer, readable_name, user_line
from mla_ops.diagnostics.walk import first_write
from mla_ops.diagnostics.warm_up import GraphCall

__all__ = ["Call", "FedBack", "GraphOutput", "WatchedGraph", "WatchedInput", "Watcher"]


class WatchedInput(NamedTuple):
    """An input of a graph, by the name the user's code has for it.

    Attributes:
        name: as in ``self.cache.kv``.
        is_static: whether torch takes its address for constant.
        where: "file:line" of its first use.
        written_at: "file:line" of its first write; None if Dynamo's graph shows none.
        writer: what writes it there.
    """

    name: str
    is_static: bool
    where: str | None
    written_at: str | None
    writer: str | None


class Call(NamedTuple):
    """One call of a graph, by input: address of a tensor, value of an integer; None for others."""

    step: int
    addresses: tuple[int | None, ...]
    # Values of integer inputs: sizes of tensors, or the user's own integers.
    sizes: tuple[int | None, ...]


class GraphOutput(NamedTuple):
    """A tensor that a graph returned, without keeping it alive."""

    step: int
    storage: Any
    storage_id: int
    where: str | None
    is_cuda: bool

    def is_live(self) -> bool:
        """Tell whether anything still holds it."""
        return private.is_live(self.storage)


class FedBack(NamedTuple):
    """An output of an earlier step that a graph was given as input."""

    output: GraphOutput
    input: WatchedInput


@dataclass
class WatchedGraph:
    """One graph that Dynamo traced, and its calls."""

    compile_id: str
    inputs: tuple[WatchedInput, ...]
    # "file:line" of the line that made each output.
    output_lines: tuple[str | None, ...]
    calls: list[Call] = field(default_factory=list)
    # Bytes of each input, as of the last call.
    input_bytes: tuple[int, ...] = ()
    # Positions of inputs that another graph of the same step made: CUDA graphs own them.
    handed_on: set[int] = field(default_factory=set)


class Watcher:
    """The backend. One object serves all compilations, so that Dynamo sees one backend.

    Args:
        mode: of ``torch.compile``.
        argument_names: of the function, where Dynamo only has args[0].
        dynamic: of ``torch.compile``.
    """

    def __init__(
        self,
        mode: str | None,
        argument_names: Mapping[str, str],
        *,
        dynamic: bool | None = None,
    ) -> None:
        self.graphs: dict[str, WatchedGraph] = {}
        # Of all graphs, in order.
        self.calls: list[GraphCall] = []
        self.fed_back: list[FedBack] = []
        self.step = 0
        self._argument_names = argument_names
        self._inductor = private.inductor_backend(mode, dynamic)
        self._outputs: list[GraphOutput] = []

    def __getattr__(self, name: str) -> Any:
        # Settings that Dynamo reads from Inductor's backend.
        return getattr(self.__dict__["_inductor"], name)

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile with Inductor."""
        compile_id = private.compile_id()
        names = self._argument_names if is_outer(compile_id) else {}
        graph = WatchedGraph(compile_id, _watched_inputs(module, names), _output_lines(module))
        self.graphs[graph.compile_id] = graph
        compiled = self._inductor(module, inputs)

        def watched(*args: Any) -> Any:
            self._before(graph, args)
            result = compiled(*args)
            self._after(graph, args, result)
            return result

        return watched

    def kept(self) -> list[GraphOutput]:
        """List the outputs of finished steps that are alive.

        On the CPU something holds them; on CUDA it may be the CUDA graph that made them.
        """
        self._outputs = [output for output in self._outputs if output.is_live()]
        return list(self._outputs)

    def _before(self, graph: WatchedGraph, args: tuple[Any, ...]) -> None:
        sizes = tuple(value if type(value) is int else None for value in args)
        graph.calls.append(Call(self.step, tuple(_address(value) for value in args), sizes))
        self.calls.append(GraphCall(self.step, graph.compile_id, sizes))
        graph.input_bytes = tuple(_bytes(value) for value in args)
        made = {output.storage_id: output for output in self._outputs if output.is_live()}
        if not made:
            return
        for position, (value, watched) in enumerate(zip(args, graph.inputs, strict=False)):
            output = made.get(storage_id(value)) if isinstance(value, Tensor) else None
            if output is None:
                continue
            if output.step < self.step:
                self.fed_back.append(FedBack(output, watched))
            else:
                graph.handed_on.add(position)

    def _after(self, graph: WatchedGraph, args: tuple[Any, ...], result: Any) -> None:
        given = {storage_id(value) for value in args if isinstance(value, Tensor)}
        lines = iter(graph.output_lines)
        for value in pytree.tree_leaves(result):
            where = next(lines, None)
            if isinstance(value, Tensor) and storage_id(value) not in given:
                weak = private.weak_storage(value)
                self._outputs.append(
                    GraphOutput(self.step, weak, storage_id(value), where, value.is_cuda)
                )


def _watched_inputs(module: fx.GraphModule, names: Mapping[str, str]) -> tuple[WatchedInput, ...]:
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = []
    for node, each in zip(nodes, private.dynamo_inputs(module), strict=True):
        written = first_write(node)
        found.append(
            WatchedInput(
                name=readable_name(each.source, names),
                is_static=each.is_static,
                where=user_line(each.first_use),
                written_at=None if written is None else user_line(written.meta["stack_trace"]),
                writer=None if written is None else operator_name(written.target),
            )
        )
    return tuple(found)


def _output_lines(module: fx.GraphModule) -> tuple[str | None, ...]:
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    return tuple(
        user_line(value.meta.get("stack_trace")) if isinstance(value, fx.Node) else None
        for value in pytree.tree_leaves(output.args[0])
    )


def _address(value: Any) -> int | None:
    if not isinstance(value, Tensor):
        return None
    # An output that a CUDA graph has overwritten has no address any more.
    with contextlib.suppress(RuntimeError):
        return value.data_ptr()
    return None


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
