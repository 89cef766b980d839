"""How the cache is held decides whether torch may capture a graph that mutates it."""

import hopper
import pytest
import torch
from torch import nn

import mla_ops
from mla_ops.diagnostics import measure
from mla_ops.testing import assert_captured

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BATCH, PAGES = 4, 32


def tensors():
    generator = torch.Generator("cuda").manual_seed(5)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    return (
        torch.randn((PAGES, 64, 1, 576), generator=generator, **options),
        torch.randn((BATCH, 1, 16, 576), generator=generator, **options),
        torch.randn((BATCH, 512), generator=generator, **options),
        torch.randn((BATCH, 64), generator=generator, **options),
        torch.arange(BATCH * 4, dtype=torch.int32, device="cuda").view(BATCH, 4),
        torch.tensor([1, 64, 65, 200], dtype=torch.int32, device="cuda"),
    )


def step(pool, q, kv_c, k_pe, table, lengths):
    slots = table[:, 0].long() * 64
    mla_ops.append_kv_(pool, kv_c, k_pe, slots)
    metadata = mla_ops.mla_metadata(lengths, num_heads_q=16)
    return mla_ops.mla_decode(
        *(q, pool, table, lengths, metadata),
        softmax_scale=hopper.SCALE,
        backend="flash_mla",
    )


class AsBuffer(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.register_buffer("pool", pool, persistent=False)

    def forward(self, *arguments):
        return step(self.pool, *arguments)


class AsAttribute(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, *arguments):
        return step(self.pool, *arguments)


class Held:
    def __init__(self, pool):
        self.pool = pool


class InAnObjectOfAModule(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.held = Held(pool)

    def forward(self, *arguments):
        return step(self.held.pool, *arguments)


def expected_of(pool, *arguments):
    return step(pool.clone(), *arguments)


@pytest.mark.parametrize("holder", [AsBuffer, AsAttribute, InAnObjectOfAModule])
def test_captured_when_a_module_holds_it(flash_mla, holder):
    pool, *arguments = tensors()
    expected = expected_of(pool, *arguments)
    with hopper.cudagraph_or_error():
        measured = assert_captured(holder(pool), *arguments, steps=4, fullgraph=True)
    assert measured.captured
    assert measured.recordings == 1
    assert not measured.clones
    for result in measured.outputs:
        hopper.assert_same_bits(result, expected)


def test_captured_as_a_marked_argument(flash_mla):
    pool, *arguments = tensors()
    expected = expected_of(pool, *arguments)
    torch._dynamo.mark_static_address(pool)
    with hopper.cudagraph_or_error():
        measured = assert_captured(step, pool, *arguments, steps=4, fullgraph=True)
    assert measured.captured
    assert measured.recordings == 1
    for result in measured.outputs:
        hopper.assert_same_bits(result, expected)


def test_a_bare_argument_is_skipped_and_measure_says_so(flash_mla):
    pool, *arguments = tensors()
    expected = expected_of(pool, *arguments)
    measured = measure(step, pool, *arguments, steps=4, fullgraph=True)
    assert measured.capturable == 1
    assert measured.captured is False
    assert measured.skips >= 1
    assert not measured.recordings
    assert any("mutated" in reason for reason in measured.reasons), measured.describe()
    # Slower, not wrong.
    for result in measured.outputs:
        hopper.assert_same_bits(result, expected)
