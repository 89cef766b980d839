"""Symptom: a model that holds FlashMLA's object decodes with the schedule of its first step.

FlashMLA-style code, unmodified, through ``mla_ops.compat.flash_mla``: eager it gives FlashMLA's
results, compiled it is captured whole and stays right when lengths outgrow what was first seen.
"""

import hopper
import pytest
import torch
from torch import nn

import mla_ops
from mla_ops.compat import flash_mla as compat
from mla_ops.diagnostics import measuring

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

STEPS, LAYERS, BATCH, MAX_LEN = 100, 3, 8, 2048
# Set at these steps, one token more a step in between; row 7 is a padded row throughout.
LENGTHS = {
    0: [1, 1, 2, 63, 64, 5, 1, 0],
    20: [700, 1, 64, 65, 129, 1024, 3, 0],
    40: [1900, 1900, 1900, 1900, 1900, 1900, 1900, 0],
    60: [1, 1, 1, 1, 1, 1, 1, 0],
    80: [1, 1900, 1, 1900, 1, 1900, 1, 0],
}


class Decoder(nn.Module):
    """Layers as an engine writes them around ``import flash_mla``; a subclass plans."""

    def __init__(self, flash_mla, heads, seqlen_q=1):
        super().__init__()
        self.flash_mla, self.heads, self.seqlen_q = flash_mla, heads, seqlen_q
        pages = MAX_LEN // hopper.PAGE
        generator = torch.Generator("cuda").manual_seed(5)
        options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        for layer in range(LAYERS):
            pool = torch.randn((BATCH * pages, hopper.PAGE, 1, 576), **options)
            self.register_buffer(f"pool_{layer}", pool)
        table = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(6))
        self.register_buffer("table", table.int().view(BATCH, pages).cuda())
        self.register_buffer("lengths", torch.zeros(BATCH, dtype=torch.int32).cuda())
        self.register_buffer("q", torch.zeros((BATCH, seqlen_q, heads, 576)).bfloat16().cuda())
        self.register_buffer("kv", torch.zeros((BATCH * seqlen_q, 576)).bfloat16().cuda())

    def slots(self):
        """Where the newest tokens lie; padded rows have none."""
        ages = torch.arange(self.seqlen_q - 1, -1, -1, device="cuda")
        position = self.lengths.unsqueeze(1) - 1 - ages
        column = position.clamp(min=0) // hopper.PAGE
        slot = self.table.long().gather(1, column) * hopper.PAGE + position % hopper.PAGE
        return torch.where(position < 0, -1, slot).flatten()

    def forward(self):
        self.lengths.add_((self.lengths > 0).int() * self.seqlen_q)
        slots, q, outs, lses = self.slots(), self.q, [], []
        metadata, splits = self.plan()
        for layer in range(LAYERS):
            pool = self.get_buffer(f"pool_{layer}")
            mla_ops.append_kv_(pool, self.kv[:, :512], self.kv[:, 512:], slots)
            out, lse = self.flash_mla.flash_mla_with_kvcache(
                *(q, pool, self.table, self.lengths, 512, metadata, splits),
                softmax_scale=hopper.SCALE,
                causal=True,
            )
            outs.append(out)
            lses.append(lse)
            q = torch.cat((out, q[..., 512:]), dim=-1)
        return torch.stack(outs), torch.stack(lses)

    def prepare(self, step):
        """Change what may change between replays."""
        if step in LENGTHS:
            self.lengths.copy_(torch.tensor(LENGTHS[step], dtype=torch.int32))
        hopper.renew((self.q, self.kv), step)

    def check_against_oracle(self, outs, lses):
        q = self.q
        for layer in range(LAYERS):
            pool = self.get_buffer(f"pool_{layer}")
            check_like_flash_mla(q, pool, self.table, self.lengths, outs[layer], lses[layer])
            q = torch.cat((outs[layer], q[..., 512:]), dim=-1)


class Decoder2025(Decoder):
    """Two tensors, planned at each step."""

    def plan(self):
        return self.flash_mla.get_mla_metadata(self.lengths, self.seqlen_q * self.heads, 1)


class Decoder2026(Decoder):
    """An object, made once and held for life."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metadata, self.splits = self.flash_mla.get_mla_metadata()

    def plan(self):
        return self.metadata, self.splits


class Decoder2026Inside(Decoder):
    """An object made in the step."""

    def plan(self):
        return self.flash_mla.get_mla_metadata()


def check_like_flash_mla(q, pool, table, lengths, out, lse):
    """Compare with float64; an empty row's lse is +inf as FlashMLA writes it."""
    assert (lse[lengths == 0] == torch.inf).all()
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    hopper.check(q, pool, table, lengths, out, lse)


@pytest.mark.parametrize("generation", [Decoder2025, Decoder2026, Decoder2026Inside])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(16, 1), (128, 1), (64, 2)])
def test_100_steps_equal_eager(flash_mla, generation, heads, seqlen_q):
    model, twin = (generation(compat, heads, seqlen_q) for _ in range(2))
    with hopper.cudagraph_or_error(), measuring() as recorder:
        step_of = hopper.compiled(model)
        for step in range(STEPS):
            model.prepare(step)
            twin.prepare(step)
            torch.compiler.cudagraph_mark_step_begin()
            result = step_of()
            expected = twin()
            hopper.assert_same_bits(result, expected)
            if step % 10 == 0:
                twin.check_against_oracle(*expected)
        seen = recorder.result()
    assert (seen.graphs, seen.recordings, seen.skips) == (1, 1, 0), seen.describe()
    assert seen.replays >= STEPS - 2
    for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, other)


# FlashMLA-style code: the same source, whichever module it is given.


def decode_with_object(flash_mla, q, pool, table, lengths):
    metadata, splits = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(
        *(q, pool, table, lengths, 512, metadata, splits),
        softmax_scale=hopper.SCALE,
        causal=True,
        use_legacy=True,
    )


def decode_with_defaults(flash_mla, q, pool, table, lengths):
    metadata, _ = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(
        q, pool, table, lengths, 512, metadata, use_legacy=True
    )


def problem(lengths, heads, seqlen_q, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    pages = -(-max(lengths) // hopper.PAGE)
    table = torch.randperm(
        len(lengths) * pages, dtype=torch.int32, device="cuda", generator=generator
    )
    return (
        torch.randn((len(lengths), seqlen_q, heads, 576), **options),
        torch.randn((len(lengths) * pages, hopper.PAGE, 1, 576), **options),
        table.view(len(lengths), pages),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    )


# So large that "auto" takes FlashMLA.
LARGE = [
    ([0, 1, 63, 64, 65, 700, 2048, 0] * 4, 128, 1),
    ([300, 2, 1500, 64] * 9, 64, 2),
]
SHAPES = [
    ([4096], 16, 1),
    ([0, 1, 63, 64, 65, 700, 2048, 0], 16, 1),
    ([0, 1, 63, 64, 65, 700, 2048, 0], 128, 1),
    ([300, 2, 1500, 64], 64, 2),
    *LARGE,
]


@pytest.fixture
def package(flash_mla):
    """The real flash_mla, with the Hopper kernels of sgl-flash-mla."""
    import flash_mla as package

    assert package.has_legacy()
    return package


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"B{len(shape[0])}-H{shape[1]}")
@pytest.mark.parametrize("decode", [decode_with_object, decode_with_defaults])
def test_unmodified_code_gives_flash_mlas_results(package, decode, shape):
    """The schedules differ and so do roundings: both are within the budget of bf16."""
    q, pool, table, lengths = problem(*shape)
    out, lse = decode(compat, q, pool, table, lengths)
    own_out, own_lse = decode(package, q, pool, table, lengths)
    assert (out.dtype, out.shape, out.stride()) == (own_out.dtype, own_out.shape, own_out.stride())
    assert (lse.dtype, lse.shape) == (own_lse.dtype, own_lse.shape)
    assert torch.equal(lse == torch.inf, own_lse == torch.inf)
    assert torch.equal((lse == torch.inf).all(-1).all(-1), lengths == 0)
    assert (out[lengths == 0] == 0).all()
    finite = own_lse != torch.inf
    torch.testing.assert_close(lse[finite], own_lse[finite], atol=1e-3, rtol=0)
    difference = (out.double() - own_out.double()).square().mean().sqrt()
    assert difference <= 5e-3 * own_out.double().square().mean().sqrt()
    if decode is decode_with_object:
        check_like_flash_mla(q, pool, table, lengths, out, lse)


@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: f"B{len(shape[0])}-H{shape[1]}")
def test_flash_mlas_own_schedule_gives_its_own_bits(package, shape):
    """Large calls run FlashMLA's kernel; with its schedule nothing is left to differ."""
    q, pool, table, lengths = problem(*shape)
    _, seqlen_q, heads, _ = q.shape
    legacy = torch.ops.flash_mla_legacy
    planned = legacy.get_mla_decoding_metadata(lengths, seqlen_q * heads, 1, heads, False, None)
    out, lse = compat.flash_mla_with_kvcache(
        *(q, pool, table, lengths, 512, *planned), softmax_scale=hopper.SCALE, causal=True
    )
    own = legacy.dense_decode_fwd(*(q, pool, 512, lengths, table, hopper.SCALE, True, *planned))
    hopper.assert_same_bits((out, lse), own[:2])


def decode_twice(flash_mla, q, pool, table, few, many):
    """Hold one object while the lengths grow, as a captured decode does."""
    metadata, _ = flash_mla.get_mla_metadata()
    for lengths in (few, many):
        result = flash_mla.flash_mla_with_kvcache(
            *(q, pool, table, lengths, 512, metadata),
            softmax_scale=hopper.SCALE,
            causal=True,
            use_legacy=True,
        )
    return result


def test_an_object_held_while_lengths_grow(package):
    """Symptom: FlashMLA's own object attends to the tokens of its first call only."""
    q, pool, table, many = problem([2000, 1500, 1800, 2048], 128, 1)
    few = torch.tensor([10, 20, 30, 40], dtype=torch.int32, device="cuda")
    out, lse = decode_twice(compat, q, pool, table, few, many)
    check_like_flash_mla(q, pool, table, many, out, lse)
    stale, _ = decode_twice(package, q, pool, table, few, many)
    with pytest.raises(AssertionError):
        hopper.check(q, pool, table, many, stale, lse)
