"""Run by test_interpreted.py: lengths no memory can hold still give a plan within bounds."""

import pytest
import torch

from mla_ops.backends.triton import metadata


@pytest.mark.parametrize("schedule", ["flash_mla", "balanced"])
@pytest.mark.parametrize(
    ("batch", "parts"), [(16, 1), (32, 2), (63, 2), (100, 4), (600, 7), (1100, 7)]
)
def test_plan_stays_within_its_bounds(batch, parts, schedule):
    """Symptom: 32-bit sums wrap, the kernel hangs or names more splits than B + T - 1."""
    rows = torch.full((parts, 8), -7, dtype=torch.int32)
    splits = torch.full((batch + 1,), -7, dtype=torch.int32)
    lengths = torch.full((batch,), 2**31 - 1, dtype=torch.int32)
    metadata.mla_metadata_out(
        *(lengths, rows, splits), overhead=5, topk=None, topk_length=None, schedule=schedule
    )
    busy = rows[rows[:, 0] != 2147483647]
    assert splits[0] == 0
    assert (splits.diff() >= 1).all()
    assert splits[-1] <= batch + parts - 1
    assert (busy[:, :2] >= 0).all()
    assert (busy[:, :2] < batch).all()
    assert (busy[:, 2:4] >= 0).all()
    # Every part goes on where the one before it ended.
    assert (busy[1:, 0] >= busy[:-1, 1]).all()
    assert busy[0, 0] == 0
    assert busy[-1, 1] == batch - 1


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of"):
        metadata.mla_metadata_out(
            *torch.zeros(3, 1, dtype=torch.int32),
            overhead=5,
            topk=None,
            topk_length=None,
            schedule="auto",
        )
