"""What Dynamo and Inductor tell of one graph: its inputs, their addresses, unsafe operators.

The third module that touches private torch names. Each answer is None or empty when the name it
needs is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

__all__ = [
    "CodeInput",
    "DynamoInput",
    "asks_for_cudagraphs",
    "code_inputs",
    "compile_id",
    "dropping_settings",
    "dynamo_inputs",
    "inductor_backend",
    "is_live",
    "is_unsafe_for_cudagraphs",
    "unbacked_symbols",
    "uncompiled",
    "weak_storage",
]

# What torch says when a tensor that a CUDA graph returned is read after the next replay.
OVERWRITTEN = "accessing tensor output of CUDAGraphs that has been overwritten"

# Settings of Inductor with which it drops CUDA graphs and does not say so -> the value without.
_DROPPING = {
    "triton.cudagraph_trees": True,
    "triton.force_cudagraphs_warmup": False,
    "triton.cudagraph_capture_sizes": None,
    "triton.cudagraph_min_partition_size": 0,
    "triton.cudagraph_skip_dynamic_graphs": False,
    "cudagraph_policy": None,
    "force_disable_cudagraph_TESTING_ONLY": False,
}
_DYNAMIC_ONLY = ("triton.cudagraph_skip_dynamic_graphs",)


class CodeInput(NamedTuple):
    """An input of generated code: its name there and its position among Dynamo's inputs."""

    name: str
    position: int
    # None: this torch does not tell.
    is_static: bool | None
    is_mutated: bool


class DynamoInput(NamedTuple):
    """An input of the graph Dynamo traced."""

    # The expression that leads to it in the user's code: L['self'].cache.
    source: str
    # Parameters, buffers, tensors of modules and tensors marked as static.
    is_static: bool
    # Stack trace of the first line that uses it.
    first_use: str


def compile_id() -> str:
    """Name the compilation that runs now, as in ``GeneratedCode.compile_id``."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def code_inputs(lowering: Any, graph: fx.Graph | None) -> tuple[CodeInput, ...]:
    """List the inputs of the graph that Inductor generates code for right now.

    Args:
        lowering: Inductor's GraphLowering.
        graph: its post-grad graph.
    """
    from torch._guards import TracingContext

    if graph is None:
        return ()
    context: Any = TracingContext.try_get()
    static = getattr(getattr(context, "fw_metadata", None), "static_input_indices", None)
    mutated = frozenset(getattr(lowering, "mutated_inputs", ()))
    inputs = []
    for position, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        index = getattr(node.meta.get("desc"), "idx", position)
        is_static = None if static is None else position in static
        inputs.append(CodeInput(node.name, index, is_static, node.name in mutated))
    return tuple(inputs)


def dynamo_inputs(module: fx.GraphModule) -> tuple[DynamoInput, ...]:
    """List the inputs of a graph that Dynamo hands to a backend."""
    inputs = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        source = getattr(node, "_dynamo_source", None)
        if source is None:
            source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", None)
        name = name() if callable(name) else name
        tensor_facts = node.meta.get("tensor_dict") or {}
        traces = [user.meta.get("stack_trace") for user in node.users]
        inputs.append(
            DynamoInput(
                source=str(name or node.name),
                is_static=bool(tensor_facts.get("_dynamo_static_input_type")),
                first_use=next((trace for trace in traces if trace), ""),
            )
        )
    return tuple(inputs)


def inductor_backend(mode: str | None, dynamic: bool | None = None) -> Callable[..., Any]:
    """Return what ``torch.compile(mode=mode, dynamic=dynamic)`` compiles with, to be wrapped."""
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        backend: Callable[..., Any] = wrapper(mode, None, dynamic)
        return backend
    from torch._inductor.compile_fx import compile_fx

    def compile_graph(module: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(module, inputs, config_patches=_mode_options(mode))

    return compile_graph


def asks_for_cudagraphs(mode: str | None) -> bool:
    """Tell whether ``torch.compile(mode=mode)`` asks for CUDA graphs."""
    import torch._inductor.config as config

    return bool(_mode_options(mode).get("triton.cudagraphs", config.triton.cudagraphs))


def dropping_settings(*, dynamic: bool) -> dict[str, object]:
    """Map the settings that drop CUDA graphs without a word now to the value that does not.

    Args:
        dynamic: whether a graph has sizes that may change.
    """
    import torch._inductor.config as config

    found: dict[str, object] = {}
    for name, kept in _DROPPING.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part, kept)
        if value != kept and (dynamic or name not in _DYNAMIC_ONLY):
            found[f"torch._inductor.config.{name}"] = kept
    return found


def _mode_options(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode not in (None, "default") else {}


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return what was given to ``torch.compile`` to get ``fn``, or ``fn`` itself."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        original: Callable[..., Any] | None = getattr(fn, name, None)
        if original is not None:
            return original
    return fn


def is_unsafe_for_cudagraphs(node: fx.Node) -> bool:
    """Tell whether an operator cannot be recorded: by its tag, or as torch lists it."""
    from torch._inductor import utils

    known = getattr(utils, "is_cudagraph_unsafe_fx_node", None)
    if known is not None:
        return bool(known(node))
    tag = getattr(torch._C.Tag, "cudagraph_unsafe", None)
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def unbacked_symbols(value: Any) -> frozenset[str]:
    """Name the sizes in ``value`` that depend on what a tensor holds."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset()
    return frozenset(map(str, free_unbacked_symbols(value)))


def weak_storage(tensor: torch.Tensor) -> Any:
    """Return a reference that does not keep the storage of ``tensor`` alive, for ``is_live``."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def is_live(storage: Any) -> bool:
    """Tell whether a storage still exists."""
    return not storage.expired()
