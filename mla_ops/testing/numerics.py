"""Error budgets: results against a float64 reference."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "LSE_ATOL",
    "OUT_BUDGET",
    "ROW_FACTOR",
    "assert_close_to_fp64",
    "assert_lse_close_to_fp64",
]

# The largest relative RMS error of `out` by dtype; a same-dtype reference may only tighten it.
OUT_BUDGET = {
    torch.bfloat16: 5e-3,
    torch.float16: 5e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
LSE_ATOL = 1e-3
# What a kernel may lose beside a plain reference in its own dtype: another order of summation.
_REFERENCE_FACTOR = 2.0
# One row may miss by more than all rows together, but not by as much as a wrong key would.
ROW_FACTOR = 16.0


def assert_close_to_fp64(
    actual: Tensor,
    expected_fp64: Tensor,
    *,
    dtype: torch.dtype | None = None,
    reference_low: Tensor | None = None,
) -> None:
    """Check ``out`` against a float64 result within the budget of its dtype.

    The relative RMS error must be within the budget over the whole tensor, and within 16 times
    the budget in every row (last dimension), so that one wrong row among thousands is seen.
    Rows of zeros, such as those without keys, must be zeros.

    Args:
        actual: the result.
        expected_fp64: float64, the same shape.
        dtype: whose budget holds; None means that of ``actual``.
        reference_low: a plain reference computed in ``dtype``: the budget becomes twice its error
            (at least the rounding error of the dtype) where that is smaller.

    Raises:
        AssertionError: shape, NaN or infinity, a row of zeros, or an error beyond the budget.
        TypeError: ``expected_fp64`` is not float64, or there is no budget for ``dtype``.
    """
    dtype = actual.dtype if dtype is None else dtype
    _check_arguments("assert_close_to_fp64", actual, expected_fp64)
    if dtype not in OUT_BUDGET:
        raise TypeError(
            f"assert_close_to_fp64: dtype must be one of {list(OUT_BUDGET)}, got {dtype}"
        )
    result, expected = actual.detach().double().cpu(), expected_fp64.detach().cpu()
    if actual.numel() == 0:
        return
    if not bool(result.isfinite().all()):
        raise AssertionError(f"out has {_bad(result)} NaN or infinite elements")
    budget = _budget(dtype, expected, reference_low)
    error, scale = (result - expected), expected.square().mean().sqrt().item()
    row_error, row_scale = _row_rms(error), _row_rms(expected)
    wrong_zeros = (row_scale == 0) & (row_error > 0)
    if bool(wrong_zeros.any()):
        raise AssertionError(f"out must be 0 in row {_where(wrong_zeros)}, whose reference is 0")
    relative = error.square().mean().sqrt().item() / max(scale, torch.finfo(dtype).tiny)
    # A row far below the others drowns in what rounding of the large ones costs: floor its scale.
    worst = row_error / row_scale.clamp(min=max(scale * 1e-2, torch.finfo(dtype).tiny))
    if not relative <= budget or not worst.max().item() <= ROW_FACTOR * budget:
        raise AssertionError(
            f"out: relative RMS error {relative:.3g}, budget {budget:.3g} ({dtype}); worst row "
            f"{_where(worst == worst.max())}: {worst.max().item():.3g}, budget "
            f"{ROW_FACTOR * budget:.3g}; largest difference {error.abs().max().item():.3g}"
        )


def assert_lse_close_to_fp64(
    actual: Tensor, expected_fp64: Tensor, *, atol: float = LSE_ATOL
) -> None:
    """Check ``lse`` against a float64 result: within ``atol``, -inf exactly where it is expected.

    Raises:
        AssertionError: shape, NaN, an infinity in the wrong place, or an error beyond ``atol``.
        TypeError: ``expected_fp64`` is not float64.
    """
    _check_arguments("assert_lse_close_to_fp64", actual, expected_fp64)
    result, expected = actual.detach().double().cpu(), expected_fp64.detach().cpu()
    if actual.numel() == 0:
        return
    if bool(result.isnan().any()):
        raise AssertionError(f"lse is NaN at {_where(result.isnan())}")
    infinite = result.isinf() | expected.isinf()
    misplaced = infinite & (result != expected)
    if bool(misplaced.any()):
        at = misplaced.nonzero()[0]
        raise AssertionError(
            f"lse must be {expected[tuple(at)].item()} at {at.tolist()}, "
            f"got {result[tuple(at)].item()} (-inf marks exactly the rows without keys)"
        )
    error = torch.where(infinite, 0.0, (result - expected).abs())
    if not error.max().item() <= atol:
        raise AssertionError(
            f"lse: error {error.max().item():.3g} at {_where(error == error.max())}, "
            f"budget {atol:.3g}"
        )


def _check_arguments(name: str, actual: Tensor, expected: Tensor) -> None:
    if expected.dtype != torch.float64:
        raise TypeError(
            f"{name}: expected_fp64 must be float64, got {expected.dtype} (compute it in float64)"
        )
    if actual.shape != expected.shape:
        raise AssertionError(f"shape must be {tuple(expected.shape)}, got {tuple(actual.shape)}")
    if not bool((expected.isfinite() | (expected == -torch.inf)).all()):
        raise AssertionError("the reference holds NaN or +inf: it is wrong itself")


def _budget(dtype: torch.dtype, expected: Tensor, reference_low: Tensor | None) -> float:
    ceiling = OUT_BUDGET[dtype]
    if reference_low is None:
        return ceiling
    error = (reference_low.detach().double().cpu() - expected).square().mean().sqrt()
    relative = (error / expected.square().mean().sqrt()).item()
    if relative != relative:
        raise AssertionError("reference_low holds NaN: no budget can be derived from it")
    # Half a unit in the last place, evenly spread: what storing the exact result costs.
    rounding = torch.finfo(dtype).eps / 12**0.5
    return min(ceiling, max(_REFERENCE_FACTOR * relative, rounding))


def _row_rms(values: Tensor) -> Tensor:
    rows = values if values.dim() else values.reshape(1)
    return rows.square().mean(-1).sqrt()


def _bad(values: Tensor) -> int:
    return int((~values.isfinite()).sum().item())


def _where(mask: Tensor) -> list[int]:
    """Return the first index at which the mask holds."""
    return list(map(int, mask.nonzero()[0].tolist()))
