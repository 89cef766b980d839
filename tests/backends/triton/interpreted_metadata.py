"""Run by test_interpreted.py: the scheduler kernel equals the CPU's, bit for bit."""

import random

import pytest
import torch

from mla_ops.backends import cpu
from mla_ops.backends.triton import metadata


def plan(backend, lengths, parts, schedule, topk=None, topk_length=None):
    rows = torch.full((parts, 8), -7, dtype=torch.int32)
    splits = torch.full((lengths.numel() + 1,), -7, dtype=torch.int32)
    backend.mla_metadata_out(
        *(lengths, rows, splits),
        overhead=5,
        topk=topk,
        topk_length=topk_length,
        schedule=schedule,
    )
    return rows, splits


@pytest.mark.parametrize("schedule", ["flash_mla", "balanced"])
@pytest.mark.parametrize("parts", [1, 7, 66])
def test_equals_cpu(schedule, parts):
    rng = random.Random(parts)
    for batch in (0, 1, 2, 5, 33):
        lengths = [rng.choice([0, 1, 63, 64, 65, 1000, 20000]) for _ in range(batch)]
        lengths = torch.tensor(lengths, dtype=torch.int32)
        for ours, expected in zip(
            plan(metadata, lengths, parts, schedule),
            plan(cpu, lengths, parts, schedule),
            strict=True,
        ):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("ragged", [False, True])
def test_sparse_lengths_equal_cpu(ragged):
    lengths = torch.tensor([5, 70, 4000], dtype=torch.int32)
    topk_length = torch.tensor([0, 64, 2048], dtype=torch.int32) if ragged else None
    ours = plan(metadata, lengths, 7, "flash_mla", 2048, topk_length)
    expected = plan(cpu, lengths, 7, "flash_mla", 2048, topk_length)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
