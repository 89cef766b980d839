"""What torch.compile did with a callable: measured once, used by demo, testing and explain."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mla_ops import _torch_breaks
from mla_ops import _torch_compile as private
from mla_ops._torch_graphs import CodeInput
from mla_ops.diagnostics.breaks import joined_breaks
from mla_ops.diagnostics.copies import BigCopy, graph_copies, graph_inputs, symbol_hints
from mla_ops.diagnostics.generated_code import CodeFacts, read_code
from mla_ops.diagnostics.measurement import GraphBreak, Measurement, Recompile
from mla_ops.diagnostics.warm_up import GraphCall, recordings_due
from mla_ops.diagnostics.watch import Watcher

__all__ = ["BIG_BYTES", "CompiledGraph", "Recorder", "measure", "measuring"]

# 1 MiB: above the activations of a decode step, below any useful pool.
BIG_BYTES = 1 << 20


class CompiledGraph(NamedTuple):
    """One graph that Inductor compiled.

    Attributes:
        compile_id: "3/1" is the second compilation of frame 3.
        code: the Python generated for it.
        facts: what the code does in a step; None where it cannot be read.
        copies: copies of big buffers in ``graph``.
        wants_cudagraphs: whether CUDA graphs were asked for.
        on_cuda: whether it runs on a CUDA device.
        graph: Inductor's post-grad graph.
        inputs: the inputs of the code, in order.
    """

    compile_id: str
    code: str
    facts: CodeFacts | None
    copies: list[BigCopy] | None
    wants_cudagraphs: bool
    on_cuda: bool
    graph: fx.Graph | None
    inputs: tuple[CodeInput, ...]

    @property
    def big_copies(self) -> list[BigCopy] | None:
        """Copies in the code, or in the graph where the code cannot be read."""
        return self.copies if self.facts is None else self.facts.copies


class Recorder:
    """Collects while ``measuring`` is entered; ``result`` may be read inside or after it."""

    def __init__(self, big_bytes: int = BIG_BYTES) -> None:
        self.big_bytes = big_bytes
        # All that were compiled, in order.
        self.graphs: list[CompiledGraph] = []
        self._recompiles: list[Recompile] = []
        self._messages: list[str] = []
        # The graph of each recording.
        self._recordings: list[str] = []
        self._replays = 0
        self._events_known = False
        self._replays_known = False
        self._breaks_known = True
        self._breaks_before = len(_torch_breaks.graph_breaks() or ())
        self._unresumed: list[tuple[str, _torch_breaks.Stack]] = []
        self._unresumed_known = False
        self._guards_seen = Counter(private.guard_failures() or ())
        self._graphs_before = private.counter("stats", "unique_graphs")
        self._skips_before = private.counter("inductor", "cudagraph_skips")

    def result(
        self, outputs: Sequence[Any] = (), calls: Sequence[GraphCall] | None = None
    ) -> Measurement:
        """Return what was seen so far; ``calls`` of graphs tell which recordings are missing."""
        graphs = _since(self._graphs_before, private.counter("stats", "unique_graphs"))
        facts = [graph.facts for graph in self.latest()]
        # Code that was never shown says nothing about copies, unless nothing was compiled.
        readable = bool(facts) or graphs == 0
        launches: Counter[str] = sum((fact.launches for fact in facts if fact), Counter())
        all_read = readable and all(fact is not None for fact in facts)
        capturable = [g.compile_id for g in self.graphs if g.wants_cudagraphs and g.on_cuda]
        warmed_up, unrecorded = self._missing(calls, capturable)
        return Measurement(
            graphs=graphs,
            breaks=self._breaks(),
            recompiles=tuple(self._recompiles) if self._events_known else None,
            launches=dict(sorted(launches.items())) if all_read else None,
            kernels=sum(fact.kernels for fact in facts if fact) if all_read else None,
            clones=self._clones() if readable else None,
            capturable=len(capturable),
            recordings=len(self._recordings) if self._events_known else None,
            replays=self._replays if self._replays_known else None,
            skips=self._skips(),
            reasons=tuple(self._messages),
            codes=tuple(graph.code for graph in self.graphs),
            outputs=tuple(outputs),
            warmed_up=warmed_up,
            unrecorded=unrecorded,
        )

    def _breaks(self) -> tuple[GraphBreak, ...] | None:
        """List each break once; without torch's log those in the list are all that is known."""
        listed = _torch_breaks.graph_breaks() if self._breaks_known else None
        if listed is None or not (self._unresumed_known or listed[self._breaks_before :]):
            return None
        return joined_breaks(listed[self._breaks_before :], self._unresumed)

    def _missing(
        self, calls: Sequence[GraphCall] | None, capturable: Sequence[str]
    ) -> tuple[int | None, int | None]:
        """Count the graphs of which no recording is due, and those whose recording is missing."""
        if calls is None:
            return None, None
        due = recordings_due(calls, set(capturable))
        # A graph and its backward share an id.
        warmed_up, recorded = len(capturable) - len(due), set(self._recordings)
        # A recording of none of these: this torch does not name the graph.
        named = self._events_known and recorded <= {graph.compile_id for graph in self.graphs}
        return warmed_up, len(due - recorded) if named else None

    def _skips(self) -> int | None:
        """Count skips of graphs on CUDA: torch also counts, without a word, those on the CPU."""
        counted = _since(self._skips_before, private.counter("inductor", "cudagraph_skips"))
        on_cpu = sum(graph.wants_cudagraphs and not graph.on_cuda for graph in self.graphs)
        return None if counted is None else max(counted - on_cpu, len(self._messages))

    def latest(self) -> list[CompiledGraph]:
        """Return the last graph of each frame: what a step runs now."""
        return list({_frame(graph.compile_id): graph for graph in self.graphs}.values())

    def _clones(self) -> tuple[BigCopy, ...] | None:
        found: list[BigCopy] = []
        for graph in self.latest():
            if graph.big_copies is None:
                return None
            found += graph.big_copies
        return tuple(found)

    def _add_graph(self, seen: private.GeneratedCode) -> None:
        graph = seen.graph
        inputs = {} if graph is None else graph_inputs(graph)
        symbols = {} if graph is None else symbol_hints(graph)
        self.graphs.append(
            CompiledGraph(
                compile_id=seen.compile_id,
                code=seen.code,
                # Without the graph the sizes of the inputs are unknown, and so are the copies.
                facts=None
                if graph is None
                else read_code(seen.code, inputs, symbols, self.big_bytes),
                copies=None if graph is None else graph_copies(graph, self.big_bytes),
                wants_cudagraphs=seen.wants_cudagraphs,
                on_cuda="cuda" in seen.device_types,
                graph=graph,
                inputs=seen.inputs,
            )
        )

    def _add_event(self, trigger: str, compile_id: str) -> None:
        if trigger == "CUDAGRAPH_RECORDING":
            self._recordings.append(compile_id)
        elif trigger == "RESET":
            # Breaks until now are gone from torch's list.
            self._breaks_known = False
            self._guards_seen.clear()
        elif trigger == "DYNAMO":
            failures = Counter(private.guard_failures() or ())
            new = tuple((failures - self._guards_seen).elements())
            self._guards_seen = failures
            if _is_recompile(compile_id):
                self._recompiles.append(Recompile(compile_id, new))

    def _add_unresumed(self, reason: str, stack: _torch_breaks.Stack) -> None:
        self._unresumed.append((reason, stack))

    def _add_replay(self) -> None:
        self._replays += 1

    @contextlib.contextmanager
    def _recording(self) -> Iterator[Recorder]:
        with (
            private.caches_off(),
            private.generated_code(self._add_graph),
            private.skip_messages(self._messages),
            _torch_breaks.unresumed_breaks(self._add_unresumed) as self._unresumed_known,
            private.compile_events(self._add_event) as self._events_known,
            private.replays(self._add_replay) as self._replays_known,
        ):
            yield self


@contextlib.contextmanager
def measuring(big_bytes: int = BIG_BYTES, *, reset: bool = True) -> Iterator[Recorder]:
    """Record what torch.compile does with the code inside the ``with`` statement.

    Settings, hooks and logging of the caller are as before afterwards. Inside, compile caches are
    off, so that code is generated where it can be seen.

    Args:
        big_bytes: from how many bytes on a copied buffer counts as a clone.
        reset: forget all compiled functions first (``torch._dynamo.reset``); else only what is
            compiled inside is seen.

    Yields:
        Recorder: ``recorder.result()`` is the Measurement.
    """
    if reset:
        private.reset()
    with Recorder(big_bytes)._recording() as recorder:
        yield recorder


def measure(
    fn: Callable[..., Any],
    *args: Any,
    steps: int = 3,
    mode: str | None = "reduce-overhead",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    big_bytes: int = BIG_BYTES,
    inputs: Callable[[int], Sequence[Any]] | None = None,
    reset: bool = True,
    **kwargs: Any,
) -> Measurement:
    """Compile ``fn``, run it ``steps`` times and tell what happened.

    Args:
        fn: function or module, not compiled yet.
        *args: its arguments, the same objects at every step.
        steps: calls; CUDA graphs need 3 (warm-up, recording, replay).
        mode: of ``torch.compile``.
        fullgraph: of ``torch.compile``; False lists graph breaks instead of raising.
        dynamic: of ``torch.compile``.
        big_bytes: from how many bytes on a copied buffer counts as a clone.
        inputs: makes the positional arguments of each step from its number, in place of ``args``.
        reset: forget all compiled functions first.
        **kwargs: keyword arguments of ``fn``.

    Returns:
        Measurement.

    Raises:
        TypeError: both ``args`` and ``inputs`` were given.
    """
    if args and inputs is not None:
        raise TypeError("measure: args must be empty with inputs=, got both (give one of them)")
    with measuring(big_bytes, reset=reset) as recorder:
        watcher = Watcher(mode, {}, dynamic=dynamic)
        # Without a reset, what was compiled before is to serve: a backend of our own would not.
        how: dict[str, Any] = {"backend": watcher} if reset else {"mode": mode}
        compiled = torch.compile(fn, fullgraph=fullgraph, dynamic=dynamic, **how)
        outputs = []
        for step in range(steps):
            watcher.step = step
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(*(args if inputs is None else inputs(step)), **kwargs)
            # Copied: the next replay overwrites the tensors a CUDA graph returned.
            outputs.append(pytree.tree_map_only(torch.Tensor, _copy, result))
        return recorder.result(outputs, watcher.calls if reset else None)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _since(before: int | None, now: int | None) -> int | None:
    """Subtract counters; one that was cleared meanwhile counts from 0."""
    if before is None or now is None:
        return None
    return now - before if now >= before else now


def _frame(compile_id: str) -> str:
    """Cut "3/1" (frame 3, its second compilation) to the frame, attempts left out."""
    return compile_id.split("/")[0]


def _is_recompile(compile_id: str) -> bool:
    match = re.search(r"/(\d+)", compile_id)
    return match is not None and int(match[1]) > 0
