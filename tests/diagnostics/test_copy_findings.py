"""Copies of a cache in the kernel that writes it are seen; work on what was written is none."""

import pytest
import torch
from torch import nn

from mla_ops import explain

SHAPE = (64, 32)
BYTES = 64 * 32 * 4


class Cached(nn.Module):
    """Writes a row of its cache, then reads all of it."""

    def __init__(self, read):
        super().__init__()
        self.register_buffer("kv", torch.zeros(SHAPE))
        self.read = read

    def forward(self, x):
        self.kv[0] = x[0]
        return self.read(self.kv, x)


def transposed(kv, x):
    return x @ kv.t().contiguous()


def viewed(kv, x):
    return x @ kv.t()


def cast(kv, x):
    return x.half() @ kv.half().t()


def doubled(kv, x):
    return kv * 2


def activated(kv, x):
    return kv.exp() @ x.t()


@pytest.mark.parametrize(
    ("read", "kind", "fix"),
    [
        (transposed, "big_copy", "drop .clone() and .contiguous()"),
        (cast, "dtype_copy", "keep self.kv in torch.float16"),
    ],
)
def test_a_copy_in_the_kernel_that_writes_is_seen(read, kind, fix):
    """Symptom: nothing found, for the fused kernel reads the cache as its own output."""
    (found,) = explain(Cached(read), torch.ones(2, 32), big_bytes=BYTES // 2).findings
    assert (found.kind, found.argument) == (kind, "self.kv")
    assert found.where.rpartition(":")[0] == __file__
    assert fix in found.fix


@pytest.mark.parametrize("read", [viewed, doubled, activated])
def test_work_on_what_was_just_written_is_no_copy(read):
    report = explain(Cached(read), torch.ones(2, 32), big_bytes=BYTES // 2)
    assert report.ok, str(report)
