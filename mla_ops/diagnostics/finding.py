"""Finding: one cause, where it is and what mends it; and the causes there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["KINDS", "Finding", "merged"]

# Kind -> what it costs.
KINDS = {
    "graph_break": "the function falls apart into graphs with Python between, or runs as Python",
    "recompile_shape": "a new graph for another size, dtype or layout of a tensor",
    "recompile_value": "a new graph for another value of a Python number",
    "recompile_global": "a new graph for another value of a global",
    "recompile_other": "a new graph because another guard failed",
    "mutated_input": "a written input without a fixed address keeps its graph out of CUDA graphs",
    "changed_address": "a tensor taken for static moved: a new CUDA graph for each address",
    "rerecorded": "more CUDA graphs than graphs: each costs a recording and memory",
    "cpu_tensor": "work on the CPU splits the CUDA graph and waits for the GPU",
    "device_copy": "a copy between devices splits the CUDA graph",
    "item": "a value read by Python splits the graph and waits for the GPU",
    "unsafe_operator": "an operator that CUDA graphs cannot record splits them",
    "unbacked_size": "a size that depends on values splits the CUDA graph",
    "big_copy": "a big buffer is copied at every step",
    "dtype_copy": "a big buffer is converted at every step",
    "cache_copy": "an indexed write copies the whole cache at every step",
    "copied_input": "a big argument without a fixed address is copied before each replay",
    "metadata_launches": "the same scheduler metadata is computed more than once in a step",
    "kept_output": "an output that something keeps is overwritten by the next replay",
    "step_failed": "a step ended with an error",
    "overwritten_output": "an output of an earlier step is read after it was overwritten",
    "cudagraph_skip": "torch left CUDA graphs out and said why",
    "cudagraph_silent": "CUDA graphs were asked for, none was recorded and torch said nothing",
}


@dataclass(frozen=True)
class Finding:
    """One cause of lost time.

    Attributes:
        kind: one of ``KINDS``.
        what: what happened, in one line.
        fix: what mends it.
        where: "file:line" in the user's source; None (null) if it cannot be told.
        argument: the tensor or value, by the name the user's code has for it; None if there is
            none to blame.
        operator: the operator; None if there is none to blame.
        bytes: bytes copied a step; None where nothing is copied.
        count: how often.
    """

    kind: str
    what: str
    fix: str
    where: str | None = None
    argument: str | None = None
    operator: str | None = None
    bytes: int | None = None
    count: int = 1

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Join findings of one cause on one line: of a loop, of several compilations."""
    found: dict[tuple[str | None, ...], Finding] = {}
    for each in findings:
        key = (each.kind, each.where, each.argument, each.operator)
        first = found.get(key)
        if first is None:
            found[key] = each
            continue
        sizes = [size for size in (first.bytes, each.bytes) if size is not None]
        found[key] = replace(
            first, count=first.count + each.count, bytes=sum(sizes) if sizes else None
        )
    return tuple(found.values())
