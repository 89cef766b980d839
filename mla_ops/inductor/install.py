"""Installing the passes on Inductor's config, beside the passes the user set."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getsource
from typing import Any

from torch import fx

from mla_ops.inductor.dedup import collapse_metadata
from mla_ops.inductor.snapshot import keep_copies

__all__ = ["SWITCH", "enable", "install", "installed", "uninstall"]

SWITCH = "MLA_OPS_INDUCTOR_PASS"


def install() -> bool:
    """Add the correctness pass and the missing lowering to Inductor; a second call does nothing.

    A pass the user set on ``torch._inductor.config.joint_custom_pre_pass`` runs first. Set the
    environment variable ``MLA_OPS_INDUCTOR_PASS=0`` to leave Inductor as it is: then a clone that
    is mutated beside its source may alias it, and a view with a symbolic storage offset is
    refused.

    Returns:
        Whether the pass is installed.
    """
    if os.environ.get(SWITCH) == "0":
        return installed()
    if not installed():
        import torch._inductor.config as config

        config.joint_custom_pre_pass = _beside(
            config.joint_custom_pre_pass, _keep_views_and_copies
        )
    return True


def uninstall() -> None:
    """Give Inductor back the pass the user had."""
    import torch._inductor.config as config

    current: Any = config.joint_custom_pre_pass
    if installed():
        config.joint_custom_pre_pass = current.previous


def installed() -> bool:
    """Tell whether the correctness pass runs in compilations that start now."""
    import torch._inductor.config as config

    return getattr(config.joint_custom_pre_pass, "own", None) is _keep_views_and_copies


@contextmanager
def enable() -> Iterator[None]:
    """Collapse identical metadata computations of one step, in compilations inside this context.

    Two calls collapse only when every argument and every written buffer is the same value and
    nothing between them wrote any of it. A pass the user set on
    ``torch._inductor.config.post_grad_custom_pre_pass`` runs first.
    """
    import torch._inductor.config as config

    ours = _beside(config.post_grad_custom_pre_pass, _collapse)
    with config.patch(post_grad_custom_pre_pass=ours):
        yield


def _keep_views_and_copies(graph: fx.Graph) -> None:
    keep_copies(graph)
    _lower_storage_offset()


def _collapse(graph: fx.Graph) -> None:
    collapse_metadata(graph)


_SOURCES: dict[Any, Any] = {_keep_views_and_copies: keep_copies, _collapse: collapse_metadata}


def _beside(previous: Any, own: Callable[[fx.Graph], None]) -> Any:
    """Return a pass that runs ``previous`` (None, a pass or a sequence of them), then ``own``."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)
    passes = tuple(each for each in passes if each is not None)

    class Beside(CustomGraphPass):
        def __init__(self) -> None:
            self.previous = previous
            self.own = own

        def __call__(self, graph: fx.Graph) -> None:
            for each in (*passes, own):
                each(graph)

        def uuid(self) -> Any:
            ids = [getattr(each, "uuid", lambda: None)() for each in passes]
            # A user's pass without a uuid bypasses the compile caches, and so must the pair.
            if None in ids:
                return None
            return (own.__name__, hashlib.sha256(_module_source(own)).hexdigest(), *ids)

    return Beside()


def _module_source(own: Callable[[fx.Graph], None]) -> bytes:
    return getsource(sys.modules[_SOURCES[own].__module__]).encode()


def _lower_storage_offset() -> None:
    """Lower aten.sym_storage_offset to the expression it was traced as.

    Without a lowering its fallback runs on tensors rebuilt without an offset: an operator that
    mutates ``kvs[i]`` inside the region then writes layer 0, silently (dynamic shapes).
    """
    import torch
    from torch._inductor import lowering

    op = torch.ops.aten.sym_storage_offset.default
    if op in lowering.lowerings:
        return

    @lowering.register_lowering(op)
    def sym_storage_offset(_tensor: Any) -> Any:
        from torch._inductor.virtualized import V

        value = V.graph.current_node.meta["val"]
        return getattr(getattr(value, "node", None), "expr", value)
