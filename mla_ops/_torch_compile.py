"""What torch.compile tells about itself: the second module that touches private torch names.

Every reader answers None ("unknown") when the name it needs is gone, so that a new torch release
turns a figure into "unknown" instead of into a wrong number.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from mla_ops._torch_graphs import CodeInput, code_inputs, compile_id

__all__ = [
    "GeneratedCode",
    "aot_inference_graph",
    "caches_off",
    "compile_events",
    "counter",
    "fresh_fake_mode",
    "generated_code",
    "guard_failures",
    "inductor_passes",
    "replays",
    "reset",
    "skip_messages",
]

# Caches that would hand back a compiled graph without generating its code again.
_CACHES = (
    ("torch._inductor.config", "fx_graph_cache"),
    ("torch._inductor.config", "fx_graph_remote_cache"),
    ("torch._functorch.config", "enable_autograd_cache"),
    ("torch._functorch.config", "enable_remote_autograd_cache"),
    ("torch._dynamo.config", "caching_precompile"),
)


class GeneratedCode(NamedTuple):
    """One graph that Inductor has just generated code for."""

    compile_id: str
    code: str
    # The post-grad graph, or None when this torch does not show it.
    graph: fx.Graph | None
    device_types: frozenset[str]
    wants_cudagraphs: bool
    inputs: tuple[CodeInput, ...] = ()


def reset() -> None:
    """Forget every compiled function, guard and graph, as in a new process."""
    torch._dynamo.reset()


def counter(group: str, key: str) -> int | None:
    """Read one of Dynamo's counters, such as ("inductor", "cudagraph_skips")."""
    from torch._dynamo import utils

    counters = getattr(utils, "counters", None)
    return None if counters is None else int(counters[group][key])


def guard_failures() -> list[str] | None:
    """List the text of every guard that failed since the last reset, in order per function."""
    from torch._dynamo import utils

    failures = getattr(utils, "guard_failures", None)
    return None if failures is None else [str(text) for each in failures.values() for text in each]


@contextlib.contextmanager
def caches_off() -> Iterator[None]:
    """Make every compilation generate its code, whatever the compile caches hold."""
    with contextlib.ExitStack() as stack:
        for module, name in _CACHES:
            config = _module(module)
            if config is not None and hasattr(config, name):
                stack.enter_context(config.patch({name: False}))
        yield


@contextlib.contextmanager
def generated_code(callback: Callable[[GeneratedCode], None]) -> Iterator[None]:
    """Call ``callback`` with each graph Inductor generates code for; a hook already set runs too.

    Raises:
        RuntimeError: this torch has no such hook.
    """
    from torch._inductor.graph import GraphLowering

    if not hasattr(GraphLowering, "save_output_code"):
        raise RuntimeError(f"generated_code: torch {torch.__version__} has no code hook")
    previous = GraphLowering.save_output_code

    def hook(code: str) -> None:
        if previous is not None:
            previous(code)
        callback(_describe(code))

    # A plain function stored on the class is called unbound through the class: no self.
    GraphLowering.save_output_code = hook
    try:
        yield
    finally:
        GraphLowering.save_output_code = previous


def _describe(code: str) -> GeneratedCode:
    import torch._inductor.config as config
    from torch._inductor.virtualized import V

    lowering: Any = V.graph
    module = getattr(lowering, "orig_gm", None) or getattr(lowering, "module", None)
    graph = getattr(module, "graph", None)
    return GeneratedCode(
        compile_id=compile_id(),
        code=code,
        graph=graph,
        device_types=frozenset(getattr(lowering, "device_types", ())),
        wants_cudagraphs=bool(config.triton.cudagraphs),
        inputs=code_inputs(lowering, graph),
    )


@contextlib.contextmanager
def compile_events(callback: Callable[[str, str], None]) -> Iterator[bool]:
    """Call ``callback(trigger, compile_id)`` after each event, yield whether torch tells them.

    Triggers: "DYNAMO" a frame was compiled, "CUDAGRAPH_RECORDING" a CUDA graph was recorded,
    "RESET" torch._dynamo.reset() forgot what was compiled, breaks and failed guards.
    """
    from torch._dynamo import callback as dynamo_callback

    handler = getattr(dynamo_callback, "callback_handler", None)
    triggers = getattr(dynamo_callback, "CallbackTrigger", None)
    if handler is None or not hasattr(triggers, "CUDAGRAPH_RECORDING"):
        yield False
        return

    def tell(args: Any) -> None:
        callback(args.callback_trigger.name, str(args.compile_id))

    before = vars(handler).get("clear")
    clear = handler.clear

    def clear_and_stay() -> None:
        # A reset drops every callback; ours is registered again.
        clear()
        handler.register_end_callback(tell)
        callback("RESET", "")

    handler.register_end_callback(tell)
    handler.clear = clear_and_stay
    try:
        yield True
    finally:
        if before is None:
            del handler.clear
        else:
            handler.clear = before
        with contextlib.suppress(ValueError):
            handler.remove_end_callback(tell)


@contextlib.contextmanager
def skip_messages(messages: list[str]) -> Iterator[None]:
    """Collect what Inductor says when it leaves CUDA graphs out, besides logging it."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    module = _module("torch._inductor.cudagraph_utils")
    found = (getattr(module, name, None) for name in ("cudagraphs_log", "perf_hint_log"))
    loggers = [logger for logger in found if isinstance(logger, logging.Logger)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def replays(count: Callable[[], None]) -> Iterator[bool]:
    """Call ``count`` at every CUDA graph replay; yield False where there are no CUDA graphs."""
    graph_class = getattr(torch.cuda, "CUDAGraph", None)
    original = getattr(graph_class, "replay", None)
    if not torch.cuda.is_available() or graph_class is None or original is None:
        yield False
        return

    def replay(self: Any) -> None:
        count()
        original(self)

    own = "replay" in vars(graph_class)
    graph_class.replay = replay
    try:
        yield True
    finally:
        if own:
            graph_class.replay = original
        else:
            del graph_class.replay


def fresh_fake_mode(like: list[torch.Tensor]) -> Any:
    """Return the fake mode that the tensors belong to, or a new one."""
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensorMode

    return detect_fake_mode(like) or FakeTensorMode(allow_non_fake_inputs=True)


def aot_inference_graph(module: torch.nn.Module, inputs: list[Any]) -> fx.GraphModule:
    """Trace ``module`` into the functional graph AOTAutograd gives Inductor for inference.

    Mutated inputs are written back at its end. The write-back is appended by hand: a torch built
    without CUDA cannot trace ``copy_`` of a fake tensor on a CUDA device.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, tracing

    seen: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, _inputs: Any) -> Any:
        context: Any = TracingContext.try_get()
        _write_back(graph_module.graph, context.fw_metadata.mutated_inp_runtime_indices)
        graph_module.recompile()
        seen.append(graph_module)
        return _Boxed(graph_module)

    traced: Any = aot_module_simplified
    with caches_off(), tracing(TracingContext(fresh_fake_mode(inputs))):
        traced(module, inputs, fw_compiler=keep)
    return seen[0]


def _write_back(graph: fx.Graph, mutated: list[int]) -> None:
    """Turn the leading outputs, new values of the mutated inputs, into ``copy_`` calls."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    values = list(output.args[0])
    with graph.inserting_before(output):
        for index, value in zip(mutated, values, strict=False):
            target = placeholders[index]
            written = graph.call_function(torch.ops.aten.copy_.default, (target, value))
            written.meta["val"] = target.meta["val"]
    output.args = (values[len(mutated) :],)


class _Boxed:
    """A compiled function that AOTAutograd may hand its arguments as one list."""

    _boxed_call = True

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, args: list[Any]) -> Any:
        return self.module(*args)


def inductor_passes(module: fx.GraphModule) -> fx.GraphModule:
    """Run Inductor's joint and post-grad passes, in place: mutations become direct calls."""
    import torch._inductor.config as config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    values = [node.meta.get("val") for node in module.graph.nodes]
    fake_mode = fresh_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    # Folding constants would compute on the device the graph is for.
    off = {"joint_graph_constant_folding": False}
    with V.set_fake_mode(fake_mode), config.patch(off):
        joint_graph_passes(module)
        post_grad_passes(module, True)
    return module


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None
