"""Run by test_interpreted.py: the scheduler kernel equals the serial walk, bit for bit."""

import random

import oracle
import pytest
import torch

from mla_ops.backends.triton import metadata

PARTS = (1, 2, 7, 66, 78, 132)
FRESH = -7  # what no field ever holds


def plan(lengths, parts, schedule="flash_mla", overhead=5, topk=None, topk_length=None):
    """Run the kernel inside larger buffers; return rows and num_splits as lists."""
    rows = torch.full((parts + 2, 8), FRESH, dtype=torch.int32)
    splits = torch.full((len(lengths) + 3,), FRESH, dtype=torch.int32)
    metadata.mla_metadata_out(
        *(torch.tensor(lengths, dtype=torch.int32), rows[1 : parts + 1], splits[1:-1]),
        overhead=overhead,
        topk=topk,
        topk_length=topk_length,
        schedule=schedule,
    )
    assert (rows[[0, -1]] == FRESH).all()
    assert (splits[[0, -1]] == FRESH).all()
    return rows[1:-1].tolist(), splits[1:-1].tolist()


def check(lengths, parts, schedule="flash_mla", overhead=5):
    counted = [max(length, 0) for length in lengths]
    expected = oracle.schedule(counted, parts, overhead=overhead, balanced=schedule == "balanced")
    assert plan(lengths, parts, schedule, overhead) == expected


def test_the_documented_example():
    rows, splits = plan([0, 1, 65, 4096], 8)
    assert [row[:7] for row in rows[:3]] == [
        [0, 1, 0, 1, 0, 0, 0],
        [2, 3, 0, 4, 0, 0, 1],
        [3, 3, 4, 15, 1, 1, 1],
    ]
    assert rows[7] == [3, 3, 59, 64, 6, 1, 1, 0]
    assert splits == [0, 1, 2, 3, 10]


def draw(rng):
    """Return lengths of one regime: tiny, equal, ragged, mostly empty, one giant."""
    batch = rng.choice([1, 2, 3, rng.randint(1, 40), rng.randint(1, 140)])
    longest = rng.choice([1, 64, 65, 200, 600, 5000, 131072])
    regime = rng.choice(["ragged", "equal", "empty", "giant", "edges"])
    if regime == "equal":
        return [rng.randint(0, longest)] * batch
    if regime == "edges":
        return [64 * rng.randint(0, longest // 64 + 1) + rng.choice([-1, 0, 1])] * batch
    lengths = [rng.randint(0, longest) for _ in range(batch)]
    if regime == "empty":
        lengths = [rng.choice([0, 0, 0, -1, -(2**31), length]) for length in lengths]
    if regime == "giant":
        lengths[rng.randrange(batch)] = rng.randint(10**6, 10**8)
    return lengths


@pytest.fixture
def few_programs(monkeypatch):
    """Give each program many rows: the interpreter runs one program after the other."""
    monkeypatch.setattr(metadata, "_ROWS", 64)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.usefixtures("few_programs")
def test_equals_the_serial_walk(seed):
    rng = random.Random(seed)
    for case in range(16):
        schedule = "balanced" if case % 4 == 3 else "flash_mla"
        check(draw(rng), rng.choice(PARTS), schedule, rng.choice([5, 5, 3]))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("batch", "parts"), [(33, 30), (100, 66), (128, 132), (300, 132)])
def test_many_short_requests(batch, parts):
    """Nearly every part ends at a request of its own distance: the walk goes by doubling."""
    rng = random.Random(batch)
    for longest in (200, 400):
        lengths = [rng.randint(0, longest) for _ in range(batch)]
        blocks = sum(max(length - 1, 0) // 64 + 1 for length in lengths)
        quota = -(-(blocks + 5 * batch) // parts)
        assert 5 < quota < (metadata._SHORT.value * batch) ** 0.5
        check(lengths, parts)
        check([*lengths[:-1], 5000], parts, "balanced", overhead=3)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("quota", [46341, 65536])
def test_quotas_whose_square_is_no_int32(quota):
    """Symptom: the square wrapped to a small number, and residues did not fit their bytes."""
    cuts = [quota + 3, quota + 3000, 2 * quota + 4, 2 * quota + 4000, 3 * quota]
    costs = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
    check([64 * (cost - 5) for cost in costs], 3)


@pytest.mark.parametrize("batch", [1, 33, 128, 511, 600])
def test_every_program_writes_its_own_rows(batch):
    rng = random.Random(batch)
    lengths = [rng.choice([0, 1, 64, 65, rng.randint(0, 9000)]) for _ in range(batch)]
    check(lengths, 21)


@pytest.mark.usefixtures("few_programs")
def test_more_requests_than_runs_are_kept_for():
    rng = random.Random(0)
    check([rng.randint(0, 3000) for _ in range(1100)], 132)


@pytest.mark.usefixtures("few_programs")
def test_more_parts_than_blocks():
    check([1], 300)
    check([0, 0, 0], 132)


@pytest.mark.usefixtures("few_programs")
def test_huge_lengths_that_fit():
    check([2**31 - 1], 7)
    check([2**31 - 1, 0, 1], 1)
    check([131072] * 200, 132)


@pytest.mark.parametrize("given", [None, [0, 1, 64, 2048, -3]])
def test_sparse_lengths(given):
    topk_length = None if given is None else torch.tensor(given, dtype=torch.int32)
    counted = [2048] * 5 if given is None else [max(length, 0) for length in given]
    ours = plan([9, 0, 70, 1, 5], 7, topk=2048, topk_length=topk_length)
    assert ours == oracle.schedule(counted, 7)
