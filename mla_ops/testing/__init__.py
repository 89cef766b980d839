"""What the tests of a model that uses mla_ops can use, and our own do."""

from __future__ import annotations

from mla_ops.testing.capture import (
    assert_captured,
    assert_no_cudagraph_skips,
    assert_no_pool_clones,
    assert_no_recompiles,
)
from mla_ops.testing.graphs import graph_text
from mla_ops.testing.inputs import DecodeInputs, make_decode_inputs
from mla_ops.testing.numerics import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.samples import OPERATORS, Sample, op_samples
from mla_ops.testing.support import support_matrix

__all__ = [
    "OPERATORS",
    "DecodeInputs",
    "Sample",
    "assert_captured",
    "assert_close_to_fp64",
    "assert_lse_close_to_fp64",
    "assert_no_cudagraph_skips",
    "assert_no_pool_clones",
    "assert_no_recompiles",
    "graph_text",
    "make_decode_inputs",
    "op_samples",
    "support_matrix",
]
