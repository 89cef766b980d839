"""Measurement: the facts, and how they read. Figures torch does not tell are None, never 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mla_ops.diagnostics.copies import BigCopy

__all__ = ["GraphBreak", "Measurement", "Recompile"]


class GraphBreak(NamedTuple):
    """Where and why one function became several graphs.

    Attributes:
        reason: what torch says.
        where: "file:line", or "unknown line".
        resumed: whether torch compiles what comes after it; not in a loop, a try or a context
            manager: there it leaves the rest of the function, mostly all of it, to Python.
    """

    reason: str
    where: str
    resumed: bool = True


class Recompile(NamedTuple):
    """One further compilation of a frame, and the guards that failed before it."""

    compile_id: str
    guards: tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """What happened inside ``measure`` or ``measuring``; None is "unknown".

    Attributes:
        graphs: graphs compiled, recompilations included.
        breaks: graph breaks, also those that torch does not resume from.
        recompiles: compilations of a frame that already had one.
        launches: operator calls a step in the generated code, {"mla_ops.mla_decode": 4, ...}.
            A frame that was compiled more than once counts with its latest code.
        kernels: calls a step of kernels that Inductor generated.
        clones: copies a step of buffers of at least ``big_bytes``.
        capturable: graphs on a CUDA device compiled while CUDA graphs were asked for.
        recordings: CUDA graphs recorded.
        replays: CUDA graphs replayed.
        skips: times Inductor left CUDA graphs out and said so.
        reasons: what it said.
        codes: the generated code of every graph, in order.
        outputs: what each step returned, copied.
        warmed_up: graphs of ``capturable`` that had no call but warm-ups, so that no recording
            is due; None where the calls were not watched (``measuring``).
        unrecorded: graphs with a call beyond their warm-up and no recording; None where the
            calls were not watched.
    """

    graphs: int | None
    breaks: tuple[GraphBreak, ...] | None
    recompiles: tuple[Recompile, ...] | None
    launches: Mapping[str, int] | None
    kernels: int | None
    clones: tuple[BigCopy, ...] | None
    capturable: int
    recordings: int | None
    replays: int | None
    skips: int | None
    reasons: tuple[str, ...]
    codes: tuple[str, ...] = field(repr=False)
    outputs: tuple[Any, ...] = field(default=(), repr=False)
    warmed_up: int | None = None
    unrecorded: int | None = None

    @property
    def captured(self) -> bool | None:
        """Tell whether CUDA graphs served the graphs that asked for them; None: none asked."""
        if not self.capturable:
            return None
        return bool(self.recordings) and self.skips == 0 and not self.unrecorded

    def describe(self) -> str:
        """Return the facts as one line each; what is long is cut after its first line."""
        lines = [
            f"graphs: {_number(self.graphs)}",
            _listing("graph breaks", self.breaks, lambda b: f"{_first(b.reason)} ({b.where})"),
            _listing("recompiles", self.recompiles, lambda r: _first("; ".join(r.guards))),
            f"operator launches: {_launches(self.launches)}",
            _listing("big copies", self.clones, lambda c: f"{c.bytes} bytes: {c.where}"),
            f"CUDA graphs: {self.capturable} graphs asked, {_number(self.recordings)} recordings, "
            f"{_number(self.replays)} replays",
            f"CUDA graph skips: {_number(self.skips)}",
            *(f"  {_first(reason)}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def _first(text: str) -> str:
    return text.strip().split("\n")[0]


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _launches(launches: Mapping[str, int] | None) -> str:
    if launches is None:
        return "unknown"
    return ", ".join(f"{name} {count}" for name, count in launches.items()) or "none"


def _listing(name: str, items: Sequence[Any] | None, show: Callable[[Any], str]) -> str:
    if items is None:
        return f"{name}: unknown"
    return "\n".join([f"{name}: {len(items)}", *(f"  {show(item)}" for item in items)])
