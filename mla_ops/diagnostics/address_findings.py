"""Findings about addresses: tensors that torch takes for static and that moved between steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from mla_ops.diagnostics.finding import Finding
from mla_ops.diagnostics.holders import held_addresses
from mla_ops.diagnostics.watch import WatchedGraph

__all__ = ["address_findings"]

# The local variable that a name begins with: self, or layer in a function that all layers share.
_OWNER = re.compile(r"^\w+")


def address_findings(
    graph: WatchedGraph, told: set[str], fn: Callable[..., Any]
) -> Iterator[Finding]:
    """Report static inputs that moved.

    Layers that share a graph give it a tensor each: those that come back at every step stay where
    they are, and so do those that ``fn`` still holds, as experts that some steps leave out.

    Args:
        graph: a graph and its calls.
        told: inputs that are outputs of earlier steps: findings of their own.
        fn: what was compiled, after the steps.
    """
    for position, each in enumerate(graph.inputs):
        passing = _passing(graph, position) if each.is_static and each.name not in told else set()
        if not passing:
            continue
        held = _held(each.name, passing, fn)
        left = passing - set(held.values())
        places = len(left) + bool(held)
        if not left or places < 2:
            continue
        name = next(iter(held)) if len(held) == 1 else each.name
        yield Finding(
            "changed_address",
            f"{name} had {places} addresses in {len(graph.calls)} calls",
            f"make it once and write it in place: {name}.copy_(value)",
            each.where,
            name,
            count=places - 1,
        )


def _passing(graph: WatchedGraph, position: int) -> set[int]:
    """Collect the addresses of an input that not every step has."""
    steps: dict[int, set[int]] = {}
    for call in graph.calls:
        address = call.addresses[position]
        if address is not None:
            steps.setdefault(call.step, set()).add(address)
    seen = list(steps.values())
    every = seen[0].intersection(*seen) if seen else set()
    return set().union(*seen) - every


def _held(name: str, addresses: set[int], fn: Callable[..., Any]) -> dict[str, int]:
    """Map the names of ``fn`` for an input, of whichever layer, to those addresses it is at."""
    member = _OWNER.sub("", name)
    return {
        path: address
        for path, address in held_addresses(fn).items()
        if address in addresses and (path.endswith(member) if member else path == name)
    }
