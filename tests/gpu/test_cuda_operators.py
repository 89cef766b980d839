"""Every sample of every operator on a CUDA device: opcheck, and equal to the same on the CPU."""

import pytest
import torch

from mla_ops.testing.samples import OPERATORS, op_samples

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ALL = [(name, sample.id) for name in OPERATORS for sample in op_samples(name)]
# Two roundings of the result, and of the weights in the dtype of the cache.
TOLERANCE = {
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
    torch.float32: 2e-3,
    torch.float64: 1e-9,
}


def sample_of(name, sample_id, device):
    samples = op_samples(name, device=device)
    return next(sample for sample in samples if sample.id == sample_id)


def results(sample):
    """Call the operator; return what it returned and every tensor it was given."""
    returned = sample.op(*sample.args)
    returned = returned if isinstance(returned, tuple) else (returned,)
    tensors = [x for x in (*returned, *sample.args) if isinstance(x, torch.Tensor)]
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.parametrize(("name", "sample_id"), ALL, ids=lambda value: str(value))
def test_equals_the_cpu(name, sample_id):
    ours, theirs = (results(sample_of(name, sample_id, device)) for device in (DEVICE, "cpu"))
    lowest = max((TOLERANCE[x.dtype] for x in theirs if x.is_floating_point()), default=0.0)
    for got, expected in zip(ours, theirs, strict=True):
        finite = expected.isfinite() if expected.is_floating_point() else None
        if finite is None:
            assert torch.equal(got, expected)
            continue
        assert torch.equal(got.isfinite(), finite)
        # A float32 out still comes from weights in the dtype of the cache; lse has 3 dimensions.
        tolerance = lowest if expected.dim() == 4 else TOLERANCE[expected.dtype]
        torch.testing.assert_close(got[finite], expected[finite], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "sample_id"), ALL, ids=lambda value: str(value))
def test_opcheck(name, sample_id):
    sample = sample_of(name, sample_id, DEVICE)
    torch.library.opcheck(sample.op, sample.args)
