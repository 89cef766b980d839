"""The budgets accept rounding and refuse everything else."""

import pytest
import torch

from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def reference(rows=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, rows, 32, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_of_the_exact_result_passes(dtype):
    expected = reference()
    assert_close_to_fp64(expected.to(dtype), expected)
    assert_close_to_fp64(expected.to(dtype), expected, reference_low=expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_beyond_the_budget_fails(dtype):
    expected = reference()
    budget = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 5e-3)
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_close_to_fp64((expected * (1 + 2 * budget)).to(dtype), expected)


def test_budget_is_that_of_dtype_when_given():
    expected = reference()
    assert_close_to_fp64(expected * (1 + 1e-3), expected, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_close_to_fp64(expected * (1 + 1e-3), expected)


def test_low_precision_reference_tightens_the_budget():
    expected = reference()
    off = (expected * (1 + 4e-3)).bfloat16()
    assert_close_to_fp64(off, expected)
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_close_to_fp64(off, expected, reference_low=expected.bfloat16())


def test_low_precision_reference_never_widens_the_budget():
    expected = reference()
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_close_to_fp64(expected.bfloat16() * 1.1, expected, reference_low=expected * 1.1)


def test_one_wrong_row_among_many_fails():
    """The RMS of all rows hides it: one row of 160000 off by half moves it by 1e-3."""
    expected = reference(rows=40000)
    actual = expected.bfloat16()
    actual[2, 777] *= 1.5
    with pytest.raises(AssertionError, match=r"worst row \[2, 777\]"):
        assert_close_to_fp64(actual, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_never_pass(value):
    expected = reference()
    actual = expected.bfloat16()
    actual[0, 0, 0] = value
    with pytest.raises(AssertionError, match="NaN or infinite"):
        assert_close_to_fp64(actual, expected)
    with pytest.raises(AssertionError, match="reference holds NaN"):
        assert_close_to_fp64(expected.bfloat16(), torch.full_like(expected, float("nan")))


def test_empty_row_must_be_zero():
    expected = reference()
    expected[1, 2] = 0
    assert_close_to_fp64(expected.bfloat16(), expected)
    actual = expected.bfloat16()
    actual[1, 2, 5] = 1e-20
    with pytest.raises(AssertionError, match=r"must be 0 in row \[1, 2\]"):
        assert_close_to_fp64(actual, expected)


def test_all_zero_reference():
    expected = torch.zeros(2, 3, 4, dtype=torch.float64)
    assert_close_to_fp64(torch.zeros(2, 3, 4), expected)
    with pytest.raises(AssertionError):
        assert_close_to_fp64(torch.full((2, 3, 4), 1e-30), expected)


@pytest.mark.parametrize("check", [assert_close_to_fp64, assert_lse_close_to_fp64])
def test_empty_tensors_pass_and_other_shapes_do_not(check):
    check(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.float64))
    with pytest.raises(AssertionError, match="shape must be"):
        check(torch.empty(1, 4), torch.empty(4, 1, dtype=torch.float64))
    with pytest.raises(TypeError, match="must be float64"):
        check(torch.zeros(1), torch.zeros(1))


def test_integer_results_have_no_budget():
    with pytest.raises(TypeError, match="dtype must be one of"):
        assert_close_to_fp64(torch.zeros(1, dtype=torch.int32), torch.zeros(1).double())


def lse():
    expected = reference()[..., 0].clone()
    expected[0, :3] = -torch.inf
    return expected.float(), expected


def test_lse_within_a_thousandth_passes():
    actual, expected = lse()
    assert_lse_close_to_fp64(actual, expected)
    assert_lse_close_to_fp64(actual + 9e-4, expected)
    with pytest.raises(AssertionError, match="lse: error"):
        assert_lse_close_to_fp64(actual + 1.1e-3, expected)


@pytest.mark.parametrize(
    ("at", "value"),
    [((0, 0), 0.0), ((0, 0), torch.inf), ((0, 0), -1e30), ((1, 0), -torch.inf)],
)
def test_lse_infinities_must_match(at, value):
    actual, expected = lse()
    actual[at] = value
    with pytest.raises(AssertionError, match=r"lse must be \S+ at \["):
        assert_lse_close_to_fp64(actual, expected)


def test_lse_nan_never_passes():
    actual, expected = lse()
    actual[1, 1] = torch.nan
    with pytest.raises(AssertionError, match="lse is NaN"):
        assert_lse_close_to_fp64(actual, expected)
