"""What makes a time worth printing: the results that are timed, all of them, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops.backends import reference
from mla_ops.cli.bench_step import PAGE_SIZE, DecodeStep
from mla_ops.testing.numerics import LSE_ATOL, OUT_BUDGET, ROW_FACTOR

__all__ = ["Oracle", "Verdict"]

# Keys that are gathered in float64 at a time: 300 MB of 576 columns. A sequence is never split.
_TOKENS_AT_ONCE = 2**16

Result = Sequence[Tensor]


class Verdict(NamedTuple):
    """The largest relative RMS error of a pool's out, and what is wrong, if anything is."""

    error: float
    problem: str | None


class Oracle:
    """Out and lse of a step in float64: every sequence over every pool.

    Samples of rows and pools would leave the others unseen, and all of them are cheap: they are
    computed once for all backends and modes of a shape. On a CPU that takes 2 to 10 steps, less
    than the times of a shape do together. On CUDA a single time takes 23 steps, and the largest
    shape of ``bench_decode --sweep`` (batch 128, 128 heads, 131,072 tokens) is 9 TFLOP, 0.2 s at
    the float64 peak of an H200.
    """

    def __init__(self, step: DecodeStep) -> None:
        batch, heads, _, _, head_dim_v, _, seqlen_q = step.shape
        pools = step.kv.shape[0]
        wide: dict[str, Any] = {"device": step.q.device, "dtype": torch.float64}
        self._out = torch.empty((pools, batch, seqlen_q, heads, head_dim_v), **wide)
        self._lse = torch.empty((pools, batch, heads, seqlen_q), **wide)
        self._budget = OUT_BUDGET[step.q.dtype]
        rows = max(1, _TOKENS_AT_ONCE // (step.shape.pages * PAGE_SIZE))
        for pool, out, lse in zip(step.kv, self._out, self._lse, strict=True):
            for first in range(0, batch, rows):
                some = slice(first, first + rows)
                reference.mla_decode_out(
                    *(step.q[some].double(), pool, step.table[some], step.lengths[some]),
                    *(None, None, out[some], lse[some]),
                    softmax_scale=step.shape.softmax_scale,
                    causal=True,
                    attn_sink=None,
                )

    def verdict(self, results: Sequence[Result]) -> Verdict:
        """Judge the results of a step, out [B, S, H, V] and lse [B, H, S] for each pool."""
        if len(results) != len(self._out):
            return Verdict(torch.nan, f"{len(results)} results of {len(self._out)} pools")
        # One synchronisation for all pools.
        errors = torch.stack([self._errors(*each) for each in enumerate(results)]).tolist()
        # max() would pass a NaN over.
        worst = max((rms for rms, _, _ in errors), key=lambda rms: (rms != rms, rms))
        problems = (self._problem(pool, *each) for pool, each in enumerate(errors))
        return Verdict(worst, next(filter(None, problems), None))

    def _errors(self, pool: int, result: Result) -> Tensor:
        """Return the relative RMS error of out, that of its worst row, and lse's distance."""
        out, lse = result
        expected, expected_lse = self._out[pool], self._lse[pool]
        if (out.shape, lse.shape) != (expected.shape, expected_lse.shape):
            return expected.new_full((3,), torch.nan)
        wrong = out.double() - expected
        rows = torch.linalg.vector_norm(wrong, dim=-1)
        expected_rows = torch.linalg.vector_norm(expected, dim=-1)
        return torch.stack(
            (
                torch.linalg.vector_norm(wrong) / torch.linalg.vector_norm(expected),
                (rows / expected_rows).amax(),
                (lse.double() - expected_lse).abs().amax(),
            )
        )

    def _problem(self, pool: int, rms: float, row: float, lse: float) -> str | None:
        where = f"pool {pool + 1} of {len(self._out)}"
        if not rms <= self._budget:
            return f"relative error {rms:.1e}, budget {self._budget:.0e}, in {where}"
        if not row <= ROW_FACTOR * self._budget:
            most = ROW_FACTOR * self._budget
            return f"relative error {row:.1e}, budget {most:.0e}, in a row of {where}"
        if not lse <= LSE_ATOL:
            return f"lse off by {lse:.1e}, budget {LSE_ATOL:.0e}, in {where}"
        return None
