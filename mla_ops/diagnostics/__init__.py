"""What torch.compile did with your code: graphs, breaks, recompilations, copies, CUDA graphs."""

from __future__ import annotations

from mla_ops.diagnostics.copies import BigCopy
from mla_ops.diagnostics.measure import Recorder, measure, measuring
from mla_ops.diagnostics.measurement import GraphBreak, Measurement, Recompile

__all__ = [
    "BigCopy",
    "GraphBreak",
    "Measurement",
    "Recompile",
    "Recorder",
    "measure",
    "measuring",
]
