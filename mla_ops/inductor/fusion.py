"""Keeping Inductor from moving elements of a buffer within one loop over that buffer.

``append_kv_(kv, ...); kv.copy_(kv.flip(0))`` reads kv in another order than it writes it. Inductor
puts the two into one loop only where every read of kv is at the index it writes; but it looks
for reads by kv's first name, and after an operator has mutated kv the reads have a later one. So
it fuses, and the loop reads what it has just written: wrong values, silently, for every operator
that mutates (seen on torch 2.11, 2.13 and 2.14.1: flip, roll, ``kv[1:] = kv[:-1]``, a gather).
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_reads_by_every_name", "check_reads_by_first_name"]

_PATCHED = "_mla_ops_original"


def check_reads_by_every_name() -> None:
    """Have Inductor compare the reads under later names too; a second call does nothing."""
    scheduler = _scheduler()
    original = getattr(scheduler, "fusable_weak_dep", None)
    if original is None or hasattr(original, _PATCHED):
        return

    def fusable_weak_dep(self: Any, weak_dep: Any, node1: Any, node2: Any) -> bool:
        fusable = original(self, weak_dep, node1, node2)
        return fusable and not _moves_elements(self, weak_dep, node1, node2)

    setattr(fusable_weak_dep, _PATCHED, original)
    scheduler.fusable_weak_dep = fusable_weak_dep


def check_reads_by_first_name() -> None:
    """Give Inductor back its own comparison."""
    scheduler = _scheduler()
    current = getattr(scheduler, "fusable_weak_dep", None)
    if hasattr(current, _PATCHED):
        scheduler.fusable_weak_dep = getattr(current, _PATCHED)


def _scheduler() -> Any:
    from torch._inductor.scheduler import Scheduler

    return Scheduler


def _moves_elements(scheduler: Any, weak_dep: Any, reader: Any, writer: Any) -> bool:
    """Tell whether ``reader`` reads the mutated buffer, by a later name, at another index."""
    from torch._inductor.dependencies import MemoryDep

    real_names = scheduler.mutation_real_name
    mutated = real_names.get(weak_dep.mutating_buf, weak_dep.mutating_buf)
    written = [
        write
        for write in writer.read_writes.writes
        if write.name == weak_dep.mutating_buf and isinstance(write, MemoryDep)
    ]
    return any(
        not isinstance(read, MemoryDep)
        or any(read.index != write.index or read.size != write.size for write in written)
        for read in reader.read_writes.reads
        if real_names.get(read.name) == mutated
    )
