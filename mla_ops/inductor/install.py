"""Installing the passes on Inductor's config, beside the passes the user set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from mla_ops._torch_compile import GeneratedCode, generated_code
from mla_ops.inductor.dedup import collapse_metadata
from mla_ops.inductor.escape import keep_escaping_values, note_fresh_outputs
from mla_ops.inductor.fusion import check_reads_by_every_name, check_reads_by_first_name
from mla_ops.inductor.lowering import forget_lowerings, lower_mutations, lower_storage_offset
from mla_ops.inductor.parts import keep_moved_parts
from mla_ops.inductor.repair import keep_slices
from mla_ops.inductor.report import POOL_BYTES, report_pool_copies
from mla_ops.inductor.snapshot import keep_copies

__all__ = ["SWITCH", "enable", "install", "installed", "uninstall"]

SWITCH = "MLA_OPS_INDUCTOR_PASS"


def install() -> bool:
    """Add the correctness passes and what Inductor lacks to it; a second call does nothing.

    Passes the user set on ``torch._inductor.config`` (``joint_custom_pre_pass``,
    ``post_grad_custom_post_pass``) run first. Set the environment variable
    ``MLA_OPS_INDUCTOR_PASS=0`` to leave Inductor as it is: then a copy of a cache may turn out to
    be the cache, moving the elements of a mutated buffer may read what it has just written, and a
    view with a symbolic storage offset is refused.

    Returns:
        Whether the passes are installed.
    """
    if os.environ.get(SWITCH) == "0":
        return installed()
    import torch._inductor.config as config

    for slot, own in _DEFAULT.items():
        if _link(slot, own) is None:
            setattr(config, slot, _beside(getattr(config, slot), own))
    check_reads_by_every_name()
    return True


def uninstall() -> None:
    """Give Inductor back the passes the user had, its own rule of fusion and its lowerings.

    Inside ``enable`` its passes stay, and ours do not come back with the settings it restores.
    """
    import torch._inductor.config as config

    check_reads_by_first_name()
    forget_lowerings()
    for slot, own in _DEFAULT.items():
        link = _link(slot, own)
        if link is None:
            continue
        link.removed = True
        if getattr(config, slot) is link:
            setattr(config, slot, link.previous)


def installed() -> bool:
    """Tell whether the correctness passes run in compilations that start now."""
    return all(_link(slot, own) is not None for slot, own in _DEFAULT.items())


def _link(slot: str, own: Callable[[fx.Graph], None]) -> Any:
    """Return the pass of ours that runs ``own`` among those of a slot, or None."""
    import torch._inductor.config as config

    each = getattr(config, slot)
    while each is not None and (getattr(each, "own", None) is not own or each.removed):
        each = getattr(each, "previous", None)
    return each


@contextmanager
def enable(*, strict: bool = False, pool_bytes: int = POOL_BYTES) -> Iterator[None]:
    """Spend fewer launches and copies in compilations inside this context, and report the rest.

    Identical metadata computations of one step collapse to one: every argument and every written
    buffer is the same value and nothing between them wrote any of it. Where an older value of a
    mutated buffer is alive through a slice, the slice is copied instead of the buffer. Copies of
    a whole mutated buffer that remain are reported with the line that asks for them. Passes the
    user set on ``torch._inductor.config`` (``post_grad_custom_pre_pass``,
    ``post_grad_custom_post_pass``) run first.

    Args:
        strict: fail the compilation instead of warning.
        pool_bytes: bytes of the smallest buffer whose copies are reported.

    Raises:
        RuntimeError: from the compiled call in strict mode, with the copies and their lines.
    """
    import torch._inductor.config as config

    def report(seen: GeneratedCode) -> None:
        if seen.graph is not None:
            report_pool_copies(seen.graph, pool_bytes, strict=strict)

    slots = {"post_grad_custom_pre_pass": _collapse, "post_grad_custom_post_pass": _keep_parts}
    # A graph from a cache is not generated again: what was not reported is another graph.
    mark = ("strict" if strict else "warn", pool_bytes)
    passes = {slot: _beside(getattr(config, slot), own, mark) for slot, own in slots.items()}
    with config.patch(passes), generated_code(report):
        yield


def _keep_views_and_copies(graph: fx.Graph) -> None:
    keep_copies(graph)
    note_fresh_outputs(graph)
    lower_storage_offset()
    lower_mutations()


def _keep_values(graph: fx.Graph) -> None:
    keep_escaping_values(graph)
    keep_moved_parts(graph)


def _collapse(graph: fx.Graph) -> None:
    collapse_metadata(graph)


def _keep_parts(graph: fx.Graph) -> None:
    keep_slices(graph)


_DEFAULT = {
    "joint_custom_pre_pass": _keep_views_and_copies,
    "post_grad_custom_post_pass": _keep_values,
}


def _beside(previous: Any, own: Callable[[fx.Graph], None], mark: Hashable = None) -> Any:
    """Return a pass that runs ``previous`` (None, a pass or a sequence of them), then ``own``.

    ``mark`` enters the compile caches beside the text of this package.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)
    passes = tuple(each for each in passes if each is not None)

    class Beside(CustomGraphPass):
        def __init__(self) -> None:
            self.previous = previous
            self.own = own
            self.removed = False

        def __call__(self, graph: fx.Graph) -> None:
            for each in passes if self.removed else (*passes, own):
                each(graph)

        def uuid(self) -> Any:
            ids = [getattr(each, "uuid", lambda: None)() for each in passes]
            # A user's pass without a uuid bypasses the compile caches, and so must the pair.
            if None in ids:
                return None
            return tuple(ids) if self.removed else (own.__name__, _text(), mark, *ids)

    return Beside()


@cache
def _text() -> str:
    """Digest the package: what any part of it does may decide over the generated code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
