"""Findings about one graph's operators and inputs: what CUDA graphs refuse, split or pay for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mla_ops._torch_graphs import is_unsafe_for_cudagraphs, unbacked_symbols
from mla_ops.diagnostics.copies import operator_name
from mla_ops.diagnostics.finding import Finding
from mla_ops.diagnostics.measure import CompiledGraph
from mla_ops.diagnostics.walk import ancestors, line_of, mutates, root_of
from mla_ops.diagnostics.watch import WatchedGraph, WatchedInput

__all__ = ["graph_findings", "named_inputs"]

_ITEM = "aten._local_scalar_dense"
_METADATA = "mla_ops.mla_metadata"


def graph_findings(
    graph: CompiledGraph, watched: WatchedGraph | None, big_bytes: int
) -> Iterator[Finding]:
    """Explain one compiled graph.

    Args:
        graph: what Inductor compiled.
        watched: what Dynamo traced for it, and its calls; None for a backward graph.
        big_bytes: from how many bytes on an input counts as big.
    """
    if graph.graph is None:
        return
    names = named_inputs(graph, watched)
    yield from _repeated_metadata(graph.graph)
    if graph.wants_cudagraphs:
        yield from _inputs(graph, names, watched, big_bytes)
        splits = list(_splits(graph, names))
        # Old torch computes on the CPU with a tensor that lies there before it copies it: the
        # argument is the cause.
        on_cpu = {each.argument for each in splits if each.operator is None}
        yield from (each for each in splits if not (_follows(each) and each.argument in on_cpu))


def _follows(split: Finding) -> bool:
    return split.kind in ("cpu_tensor", "device_copy") and split.operator is not None


def named_inputs(graph: CompiledGraph, watched: WatchedGraph | None) -> dict[str, WatchedInput]:
    """Map the inputs of the code to those of the user."""
    if watched is None:
        return {}
    return {
        each.name: watched.inputs[each.position]
        for each in graph.inputs
        if each.position < len(watched.inputs)
    }


def _inputs(
    graph: CompiledGraph,
    names: dict[str, WatchedInput],
    watched: WatchedGraph | None,
    big_bytes: int,
) -> Iterator[Finding]:
    assert graph.graph is not None
    nodes = {node.name: node for node in graph.graph.nodes if node.op == "placeholder"}
    for each in graph.inputs:
        user = names.get(each.name)
        is_static = bool(user and user.is_static) if each.is_static is None else each.is_static
        if is_static or not isinstance(nodes[each.name].meta.get("val"), Tensor):
            continue
        if watched and each.position in watched.handed_on:
            continue
        name = user.name if user else each.name
        if each.is_mutated:
            writer = next((n for n in graph.graph.nodes if mutates(n, nodes[each.name])), None)
            yield Finding(
                "mutated_input",
                f"{name} is written, and torch cannot take its address for constant",
                f"call torch._dynamo.mark_static_address({name}) before the first step, or make "
                f"it a buffer of a module (register_buffer) that the compiled code reaches",
                (user and user.written_at) or (line_of(writer) if writer else None),
                argument=name,
                operator=(user and user.writer) or (_spelled(writer) if writer else None),
            )
        elif user and watched and each.position < len(watched.input_bytes):
            size = watched.input_bytes[each.position]
            if size >= big_bytes:
                yield Finding(
                    "copied_input",
                    f"{name} is copied to the CUDA graph's own memory before each replay",
                    f"call torch._dynamo.mark_static_address({name}) before the first step and "
                    "keep the tensor, or make it a buffer of a module",
                    user.where,
                    argument=name,
                    bytes=size,
                )


def _splits(graph: CompiledGraph, names: dict[str, WatchedInput]) -> Iterator[Finding]:
    assert graph.graph is not None
    known: set[str] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        new = _symbols(value) - known
        known |= new
        if node.op == "placeholder" and graph.on_cuda:
            yield from _cpu_input(node, names.get(node.name))
        if node.op != "call_function":
            continue
        operator, where = _spelled(node), line_of(node)
        if operator == _ITEM:
            yield Finding(
                "item",
                "Python reads the value of a tensor",
                "keep the value a tensor; do not call .item() on it",
                where,
                _argument(node, names),
                "Tensor.item",
            )
        elif new and isinstance(value, Tensor | tuple | list):
            yield Finding(
                "unbacked_size",
                f"the size of what {operator} returns depends on values",
                "give the result a fixed size: a mask with torch.where, or "
                "torch.nonzero_static(size=...)",
                where,
                _argument(node, names),
                operator,
            )
        elif is_unsafe_for_cudagraphs(node):
            yield Finding(
                "unsafe_operator",
                f"{operator} cannot be recorded in a CUDA graph",
                "call it outside the compiled step; or, for an operator of yours that neither "
                "waits for the GPU nor allocates by value, drop its tag cudagraph_unsafe",
                where,
                _argument(node, names),
                operator,
            )
        elif graph.on_cuda:
            yield from _device(node, operator, where, names)


def _cpu_input(node: fx.Node, user: WatchedInput | None) -> Iterator[Finding]:
    """Report a CPU tensor that a graph on a GPU reads."""
    if _device_types(node) != {"cpu"} or not node.users:
        return
    name = user.name if user else node.name
    yield Finding(
        "cpu_tensor",
        f"{name} lies on the CPU",
        f"move it once, before the first step: {name} = {name}.cuda()",
        user.where if user else line_of(node),
        name,
    )


def _device(
    node: fx.Node, operator: str, where: str | None, names: dict[str, WatchedInput]
) -> Iterator[Finding]:
    """Report a node of a graph on a GPU that computes on the CPU or copies between devices."""
    own = _device_types(node)
    given = {kind for source in node.all_input_nodes for kind in _device_types(source)}
    if "cpu" in given | own and "cuda" in given | own:
        sources = [source for source in node.all_input_nodes if _device_types(source) == {"cpu"}]
        if all(source.op == "placeholder" for source in sources) and own != {"cpu"}:
            # Told as the argument it is.
            return
        yield Finding(
            "device_copy",
            f"{operator} copies between CPU and GPU",
            "keep the tensor on the model's device",
            where,
            _argument(node, names),
            operator,
        )
    elif own == {"cpu"}:
        yield Finding(
            "cpu_tensor",
            f"{operator} computes on the CPU",
            "make the tensor on the model's device: device=x.device",
            where,
            _argument(node, names),
            operator,
        )


def _repeated_metadata(graph: fx.Graph) -> Iterator[Finding]:
    """Report computations of the same metadata: same operands, not written in between."""
    seen: dict[Any, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = _spelled(node)
        if name.startswith(_METADATA):
            key = (name, *map(repr, _operands(node)))
            reads = {root_of(source) for source in _read(node)}
            if key in seen and not written & reads:
                yield Finding(
                    "metadata_launches",
                    "the metadata of this step has been computed already",
                    "compute it once in the model's forward and hand it to every layer, or "
                    "compile inside `with mla_ops.inductor.enable():`",
                    line_of(node),
                    operator=name,
                )
            seen[key] = node
            written -= reads
        else:
            written |= {root_of(s) for s in node.all_input_nodes if mutates(node, root_of(s))}


def _operands(node: fx.Node) -> list[Any]:
    """List what a metadata operator reads; the buffers it fills may differ."""
    filled = {id(source) for source in node.all_input_nodes if source not in _read(node)}
    values = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return [value for value in values if id(value) not in filled]


def _read(node: fx.Node) -> list[fx.Node]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    given.update(node.kwargs)
    return [
        value
        for argument in schema
        for value in (given.get(argument.name),)
        if isinstance(value, fx.Node)
        and not (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def _argument(node: fx.Node, names: dict[str, WatchedInput]) -> str | None:
    """Name the user's tensor that a node works on, if it is one."""
    for source in (*node.all_input_nodes, *ancestors(node)):
        if source.name in names:
            return names[source.name].name
    return None


def _spelled(node: fx.Node) -> str:
    return operator_name(node.target)


def _symbols(value: Any) -> set[str]:
    return {name for leaf in pytree.tree_leaves(value) for name in unbacked_symbols(leaf)}


def _device_types(node: fx.Node) -> set[str]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
