"""What torch.compile did with your code: graphs, breaks, recompilations, copies, CUDA graphs."""

from __future__ import annotations

from mla_ops.diagnostics.copies import BigCopy
from mla_ops.diagnostics.explain import explain
from mla_ops.diagnostics.finding import Finding
from mla_ops.diagnostics.measure import Recorder, measure, measuring
from mla_ops.diagnostics.measurement import GraphBreak, Measurement, Recompile
from mla_ops.diagnostics.report import Report

__all__ = [
    "BigCopy",
    "Finding",
    "GraphBreak",
    "Measurement",
    "Recompile",
    "Recorder",
    "Report",
    "explain",
    "measure",
    "measuring",
]
