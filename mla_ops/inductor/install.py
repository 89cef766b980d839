"""Installing the default pass: once, at the first trace of an operator that mutates."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from torch import fx

from mla_ops.inductor.snapshot import keep_copies

__all__ = ["SWITCH", "install", "installed", "uninstall"]

SWITCH = "MLA_OPS_INDUCTOR_PASS"


def install() -> None:
    """Add the correctness pass and the missing lowering to Inductor; a second call does nothing.

    A pass the user set on ``torch._inductor.config.joint_custom_pre_pass`` runs first. Set the
    environment variable ``MLA_OPS_INDUCTOR_PASS=0`` to leave Inductor as it is: then a clone that
    is mutated beside its source may alias it.
    """
    if os.environ.get(SWITCH) == "0" or installed():
        return
    import torch._inductor.config as config

    config.joint_custom_pre_pass = _pass(config.joint_custom_pre_pass)


def uninstall() -> None:
    """Give Inductor back the pass the user had."""
    import torch._inductor.config as config

    current: Any = config.joint_custom_pre_pass
    if installed():
        config.joint_custom_pre_pass = current.previous


def installed() -> bool:
    """Tell whether the pass runs in compilations that start now."""
    import torch._inductor.config as config

    return hasattr(config.joint_custom_pre_pass, "mla_ops_pass")


def _pass(previous: Any) -> Any:
    """Return the pass that runs ``previous`` (None, a pass, or a sequence of them) first."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = tuple(previous) if isinstance(previous, (list, tuple)) else (previous,)
    passes = tuple(each for each in passes if each is not None)

    class KeepCopies(CustomGraphPass):
        mla_ops_pass = True

        def __init__(self) -> None:
            self.previous = previous

        def __call__(self, graph: fx.Graph) -> None:
            for each in passes:
                each(graph)
            keep_copies(graph)
            _lower_storage_offset()

        def uuid(self) -> Any:
            source = Path(__file__).with_name("snapshot.py").read_bytes()
            ids = [getattr(each, "uuid", lambda: None)() for each in passes]
            # A user's pass without a uuid bypasses the compile caches, and so must the pair.
            if None in ids:
                return None
            return ("mla_ops.keep_copies", hashlib.sha256(source).hexdigest(), *ids)

    return KeepCopies()


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
