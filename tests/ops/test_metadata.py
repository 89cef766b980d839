"""The scheduler: invariants and bit-equality with a serial walk of FlashMLA's algorithm."""

import random

import oracle
import pytest
import torch

from mla_ops import MLAMetadata, mla_metadata
from mla_ops.backends import cpu, reference
from mla_ops.ops.metadata import default_num_sm_parts

BACKENDS = {"cpu": cpu.mla_metadata_out, "reference": reference.mla_metadata_out}
# Four parts so that workers share them; ten thousand in all.
SEEDS, CASES_A_SEED = range(4), 2500


def plan(lengths, parts, *, backend, schedule, overhead=5, topk=None, topk_length=None):
    rows = torch.full((parts, 8), -7, dtype=torch.int32)
    num_splits = torch.full((len(lengths) + 1,), -7, dtype=torch.int32)
    BACKENDS[backend](
        torch.tensor(lengths, dtype=torch.int32),
        rows,
        num_splits,
        overhead=overhead,
        topk=topk,
        topk_length=topk_length,
        schedule=schedule,
    )
    return rows.tolist(), num_splits.tolist()


def random_case(rng):
    batch = rng.choice((0, 1, 1, 2, 3, 5, 8, 17, 40))
    longest = rng.choice((1, 64, 65, 500, 4096, 200_000))
    lengths = [
        rng.choice((0, 1, 64, 65, longest, rng.randint(0, longest), 64 * rng.randint(0, 40)))
        for _ in range(batch)
    ]
    parts = rng.choice((1, 2, 3, 5, 8, 16, 33, 132, 160))
    return lengths, parts, rng.choice((3, 5)), rng.random() < 0.5


def check_invariants(lengths, rows, num_splits, *, overhead, balanced):
    """Walk the parts in order: every block once, slots disjoint, no part above its payload."""
    blocks, batch, parts = oracle.request_blocks(lengths), len(lengths), len(rows)
    quota = -(-sum(n + overhead for n in blocks) // parts)
    if balanced and blocks:
        quota = max(quota, int((max(blocks) // 8) ** 0.5))
    at, slots, sharers, idle = (0, 0), [], [0] * batch, False
    for begin_req, end_req, begin_block, end_block, begin_split, first, last, pad in rows:
        if begin_req >= batch:
            assert [begin_req, end_req, begin_block, end_block, begin_split, first, last, pad] == [
                *(oracle.IDLE, 0, 0, 0, 0, 0, 0, 0)
            ]
            idle = True
            continue
        assert not idle, "idle parts come last"
        assert at == (begin_req, begin_block), "parts follow one another"
        cost = 0
        for req in range(begin_req, end_req + 1):
            start = begin_block if req == begin_req else 0
            end = end_block if req == end_req else blocks[req]
            end = blocks[req] if lengths[req] == 0 else end
            assert start < end <= blocks[req]
            cost += end - start + overhead
            slots.append(num_splits[req] + (begin_split if req == begin_req else 0))
            assert num_splits[req] <= slots[-1] < num_splits[req + 1]
            sharers[req] += 1
            at = (req, end) if end < blocks[req] else (req + 1, 0)
        assert cost <= quota + overhead
    assert at == (batch, 0)
    assert slots == list(range(num_splits[-1])), "every slot is used, and by one part"
    assert num_splits[-1] <= max(batch + parts - 1, 0)
    for begin_req, end_req, *_, first, last, _ in rows:
        if begin_req < batch:
            assert first == (sharers[begin_req] > 1)
            assert last == (sharers[end_req] > 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_fuzz(seed):
    rng = random.Random(seed)
    for _ in range(CASES_A_SEED):
        lengths, parts, overhead, balanced = random_case(rng)
        schedule = "balanced" if balanced else "flash_mla"
        got = plan(lengths, parts, backend="cpu", schedule=schedule, overhead=overhead)
        check_invariants(lengths, *got, overhead=overhead, balanced=balanced)
        assert got == oracle.schedule(lengths, parts, overhead=overhead, balanced=balanced)
        if parts <= 33:
            other = plan(lengths, parts, backend="reference", schedule=schedule, overhead=overhead)
            assert got == other


@pytest.mark.parametrize("parts", [132, 160])
@pytest.mark.parametrize("balanced", [False, True], ids=["flash_mla", "balanced"])
def test_reference_with_many_parts(parts, balanced):
    rng = random.Random(parts)
    for _ in range(100):
        lengths, _, overhead, _ = random_case(rng)
        schedule = "balanced" if balanced else "flash_mla"
        got = plan(lengths, parts, backend="reference", schedule=schedule, overhead=overhead)
        assert got == oracle.schedule(lengths, parts, overhead=overhead, balanced=balanced)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [False, True], ids=["topk", "topk_length"])
def test_sparse_lengths_replace_the_dense_ones(backend, given):
    rng = random.Random(0)
    for _ in range(200):
        topk, batch = rng.randint(1, 3000), rng.randint(0, 9)
        valid = [rng.choice((0, topk, rng.randint(0, topk))) for _ in range(batch)]
        got = plan(
            [rng.randint(0, 10**6) for _ in range(batch)],
            11,
            backend=backend,
            schedule="flash_mla",
            topk=topk,
            topk_length=torch.tensor(valid, dtype=torch.int32) if given else None,
        )
        assert got == oracle.schedule(valid if given else [topk] * batch, 11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("balanced", [False, True], ids=["flash_mla", "balanced"])
@pytest.mark.parametrize(
    ("lengths", "meaning"),
    [
        ([-1, 65, -(2**31)], [0, 65, 0]),
        ([2**31 - 1] * 3, [2**31 - 1] * 3),
        ([2**31 - 1] + [0] * 600, [2**31 - 1] + [0] * 600),
        ([1] * 2000, [1] * 2000),
    ],
    ids=["negative", "longest", "one-long-of-601", "2000-short"],
)
def test_extreme_lengths(backend, balanced, lengths, meaning):
    """A negative length is 0; 33 million blocks overflow nothing."""
    schedule = "balanced" if balanced else "flash_mla"
    got = plan(lengths, 132, backend=backend, schedule=schedule)
    assert got == oracle.schedule(meaning, 132, balanced=balanced)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "out"])
def test_the_example_of_the_format(backend, in_place):
    """4 requests over 8 parts, as FlashMLA schedules them."""
    out = None
    if in_place:
        memory = torch.full((11, 8), -7, dtype=torch.int32), torch.full((9,), -7).int()
        out = MLAMetadata(memory[0][:8], memory[1][:5])
    got = mla_metadata(
        torch.tensor([0, 1, 65, 4096], dtype=torch.int32),
        num_heads_q=16,
        num_sm_parts=8,
        schedule="flash_mla",
        backend=backend,
        out=out,
    )
    assert got.tile_scheduler_metadata.tolist() == [
        [0, 1, 0, 1, 0, 0, 0, 0],
        [2, 3, 0, 4, 0, 0, 1, 0],
        [3, 3, 4, 15, 1, 1, 1, 0],
        [3, 3, 15, 26, 2, 1, 1, 0],
        [3, 3, 26, 37, 3, 1, 1, 0],
        [3, 3, 37, 48, 4, 1, 1, 0],
        [3, 3, 48, 59, 5, 1, 1, 0],
        [3, 3, 59, 64, 6, 1, 1, 0],
    ]
    assert got.num_splits.tolist() == [0, 1, 2, 3, 10]
    if in_place:
        assert got[0] is out[0]
        assert got[1] is out[1]
        assert bool((memory[0][8:] == -7).all())
        assert bool((memory[1][5:] == -7).all())


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"num_heads_q": 16}, 132),
        ({"num_heads_q": 128}, 66),
        ({"num_heads_q": 128, "seqlen_q": 2}, 33),
        ({"num_heads_q": 63, "seqlen_q": 3}, 44),
        ({"num_heads_q": 128, "seqlen_q": 8, "num_heads_k": 2}, 8),
        ({"num_heads_q": 64, "seqlen_q": 2, "topk": 2048}, 66),
        ({"num_heads_q": 128, "topk": 2048}, 66),
        ({"num_heads_q": 16, "seqlen_q": 0}, 132),
    ],
)
def test_rows_by_flash_mlas_formula(sizes, parts):
    """Of 132 SMs, which a CPU pretends to have."""
    assert default_num_sm_parts(torch.device("cpu"), **{"seqlen_q": 1, **sizes}) == parts
    got = mla_metadata(torch.tensor([5, 70], dtype=torch.int32), **sizes)
    assert got.tile_scheduler_metadata.shape == (parts, 8)


def test_auto_is_balanced():
    lengths = [40_000, 0, 9]
    rows, num_splits = mla_metadata(torch.tensor(lengths, dtype=torch.int32), num_heads_q=16)
    assert (rows.tolist(), num_splits.tolist()) == oracle.schedule(lengths, 132, balanced=True)
    assert rows.tolist() != oracle.schedule(lengths, 132)[0]


def test_no_requests():
    rows, num_splits = mla_metadata(torch.empty(0, dtype=torch.int32), num_heads_q=16)
    assert num_splits.tolist() == [0]
    assert rows.tolist() == [[oracle.IDLE] + [0] * 7] * 132
