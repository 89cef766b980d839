"""300 steps of a compiled model against eager, bit for bit, and against float64."""

import hopper
import pytest
import torch

from mla_ops.diagnostics import measuring

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BATCH, LAYERS, STEPS, MAX_LEN = 8, 8, 300, 1536
# Set at every 25th step; advance_ grows them in between, over page and split boundaries.
LENGTHS = (
    [0, 0, 0, 0, 0, 0, 0, 0],
    [1, 62, 63, 64, 65, 127, 128, 129],
    [1500, 1, 1, 1, 1, 1, 1, 1],
    [1500, 1490, 1400, 1300, 1200, 1100, 1000, 900],
    [0, 5, 0, 700, 0, 64, 0, 1],
    [60, 60, 60, 60, 60, 60, 60, 60],
)


def prepare(model, step):
    """Change what may change between replays, the same way in every model."""
    if step % 25 == 0:
        phase = step // 25
        model.set_lengths(LENGTHS[phase % len(LENGTHS)], live=(8, 8, 5)[phase % 3])
    if step % 40 == 0:
        model.shuffle_pages(step)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
def test_300_steps_equal_eager(flash_mla, monkeypatch, seqlen_q, heads):
    run_steps(monkeypatch, flash_mla, seqlen_q, heads)


@pytest.mark.parametrize(("seqlen_q", "heads"), [(1, 16), (4, 128)])
def test_300_steps_of_the_portable_kernels_equal_eager(monkeypatch, seqlen_q, heads):
    run_steps(monkeypatch, "triton", seqlen_q, heads)


def run_steps(monkeypatch, backend, seqlen_q, heads):
    options = {"heads": heads, "seqlen_q": seqlen_q, "backend": backend}
    model, twin = (hopper.Layers(LAYERS, BATCH, MAX_LEN, **options) for _ in range(2))
    tokens, addresses = model.tokens(), model.addresses()
    with (
        hopper.counted_launches(monkeypatch) as entries,
        hopper.cudagraph_or_error(),
        measuring() as recorder,
    ):
        step_of = hopper.compiled(model)
        for step in range(STEPS):
            prepare(model, step)
            prepare(twin, step)
            hopper.renew(tokens, step)
            before = sum(entries.values()), recorder.result().replays
            torch.compiler.cudagraph_mark_step_begin()
            result = step_of(*tokens)
            entered = sum(entries.values()) - before[0]
            # Warm-up, recording, replays: from then on everything is inside the one graph.
            if step >= 2:
                assert entered == 0, f"step {step}: Python launched {entries}"
                assert recorder.result().replays == before[1] + 1
            else:
                assert entered >= 2 * LAYERS + 1
            expected = twin(*tokens)
            hopper.assert_same_bits(result, expected)
            if step % 20 == 0:
                twin.check_against_oracle(tokens[0], *expected, layers=(0, LAYERS - 1))
        seen = recorder.result()
    assert (seen.graphs, seen.recordings, seen.skips) == (1, 1, 0), seen.describe()
    assert model.addresses() == addresses
    for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, other)


def test_split_count_from_one_to_the_most_and_back(flash_mla):
    """All rows 64 tokens: one part each. One row of 120,000: split over every part there is."""
    batch, long = 16, 120_000
    model = hopper.Layers(1, batch, 64, backend=flash_mla)
    twin = hopper.Layers(1, batch, 64, backend=flash_mla)
    for each in (model, twin):
        widen(each, long)
    tokens = model.tokens()
    hopper.renew(tokens, 0)
    few, many = [63] * batch, [1] * batch
    many[5] = long - 1
    model.set_lengths(few)
    graph, (outs, lses) = hopper.captured(model, tokens)
    splits = []
    for step, lengths in enumerate((few, many, few, many, [0] * batch, few)):
        hopper.renew(tokens, step)
        model.set_lengths(lengths)
        twin.set_lengths(lengths)
        graph.replay()
        hopper.assert_same_bits((outs, lses), twin(*tokens))
        model.check_against_oracle(tokens[0], outs, lses)
        counts = model.schedule.num_splits[: batch + 1].diff()
        splits.append(int(counts.max()))
    assert [count for count in splits if count == 1] == [1, 1, 1, 1]
    assert min(splits[1], splits[3]) > 30, splits


def widen(model, tokens):
    """Give row 5 a table as wide as ``tokens``: a cache of full rows would take gigabytes."""
    cache = model.cache
    pages = -(-tokens // hopper.PAGE)
    pool = torch.randn(
        (pages + cache.max_batch_size, 64, 1, 576),
        generator=torch.Generator("cuda").manual_seed(3),
        device="cuda",
        dtype=torch.bfloat16,
    )
    table = torch.zeros((cache.max_batch_size, pages), dtype=torch.int32, device="cuda")
    table[:, 0] = torch.arange(cache.max_batch_size, dtype=torch.int32)
    table[5] = torch.randperm(pages, generator=torch.Generator().manual_seed(4)).int()
    table[5] += cache.max_batch_size
    cache._register("kv_cache_0", pool)
    cache._register("block_table", table)
    cache.max_seq_len = tokens
