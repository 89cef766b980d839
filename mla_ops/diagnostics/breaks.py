"""The graph breaks of a measurement: those torch resumes from, and those it does not."""

from __future__ import annotations

from collections.abc import Sequence

from mla_ops import _torch_breaks
from mla_ops.diagnostics.lines import user_frame
from mla_ops.diagnostics.measurement import GraphBreak

__all__ = ["joined_breaks"]

_UNKNOWN = "unknown line"


def joined_breaks(
    listed: Sequence[tuple[str, _torch_breaks.Stack]],
    unresumed: Sequence[tuple[str, _torch_breaks.Stack]],
) -> tuple[GraphBreak, ...]:
    """Drop repetitions: Dynamo meets a break again when it restarts a frame, or its caller."""
    left = {tuple(stack[-1:]) for _, stack in unresumed}
    found: dict[tuple[str, str], GraphBreak] = {}
    told = set()
    for reason, stack in listed:
        if not (left and _torch_breaks.went_back(reason)):
            last, where = tuple(stack[-1:]), _where(stack)
            found[where, reason] = GraphBreak(reason, where, resumed=last not in left)
            told.add(last)
    for reason, stack in unresumed:
        if tuple(stack[-1:]) not in told:
            # Of one line, the first reason: the next shows when it is mended.
            where = _where(stack)
            key = (where, reason if where == _UNKNOWN else "")
            found.setdefault(key, GraphBreak(reason, where, resumed=False))
    return tuple(found.values())


def _where(stack: _torch_breaks.Stack) -> str:
    return user_frame(stack) or _UNKNOWN
