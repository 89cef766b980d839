"""append_kv_ writes exactly the valid slots, bit for bit, on every layout and backend."""

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import covering_rows

from mla_ops import append_kv_
from mla_ops.backends import cpu, reference
from mla_ops.testing.inputs import make_decode_inputs

# The operator itself chooses by device; the reference is reached directly.
KERNELS = {"operator": append_kv_, "cpu": cpu.append_kv_, "reference": reference.append_kv_}
SLOTS = {
    "none": [],
    "one": [3],
    "shuffled": [7, 0, 5, 2],
    "all_skipped": [-1, -1, 8, 1 << 40],
    "padding": [-1, 4, -1, 6],
    "wrapping": [-(1 << 62), 1, -2, 2147483648],
    "last_of_the_pool": [7, -1],
    "first_skipped_first_slot_taken": [-1, 0],
}
AXES = {
    "kernel": tuple(KERNELS),
    "dims": ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32)),
    "page_size": (1, 2, 4, 8),
    "dtype": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "slots": tuple(SLOTS),
    "padded_rows": (False, True),
    "padded_pages": (False, True),
    "row_strided": (False, True),
}
TOTAL = 8


def bits(tensor):
    """Copy the whole memory under a tensor as bytes: NaN equals itself."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def make_tokens(count, latent_dim, rope_dim, dtype, row_strided):
    generator = torch.Generator().manual_seed(count)
    width = latent_dim + rope_dim + (16 if row_strided else 0)
    tokens = torch.randn(count, width, generator=generator).to(dtype)
    kv_c, k_pe = tokens[:, :latent_dim], tokens[:, latent_dim : latent_dim + rope_dim]
    return (kv_c, k_pe) if row_strided else (kv_c.contiguous(), k_pe.contiguous())


def check(kernel, kv_cache, kv_c, k_pe, slots):
    untouched = bits(kv_cache)
    expected = oracle.append(kv_cache, kv_c, k_pe, slots)
    KERNELS[kernel](kv_cache, kv_c, k_pe, slots)
    torch.testing.assert_close(kv_cache, expected, rtol=0, atol=0, equal_nan=True)
    # Write back what was there: gaps between rows and pages must not have changed either.
    original = untouched.view(kv_cache.dtype).as_strided(
        kv_cache.shape, kv_cache.stride(), kv_cache.storage_offset()
    )
    kv_cache.copy_(original)
    assert torch.equal(bits(kv_cache), untouched)


@pytest.mark.parametrize("row", covering_rows(AXES), ids=lambda r: f"{r['kernel']}-{r['slots']}")
def test_writes_exactly_the_valid_slots(row):
    latent_dim, rope_dim = row["dims"]
    kv_cache = make_decode_inputs(
        (),
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=row["page_size"],
        spare_pages=TOTAL // row["page_size"],
        dtype=row["dtype"],
        padded_rows=row["padded_rows"],
        padded_pages=row["padded_pages"],
    ).kv_cache
    slots = torch.tensor(SLOTS[row["slots"]], dtype=torch.int64)
    tokens = make_tokens(len(slots), latent_dim, rope_dim, row["dtype"], row["row_strided"])
    # The operator returns before it asks a backend for nothing.
    kernel = row["kernel"] if len(slots) else "operator"
    check(kernel, kv_cache, *tokens, slots)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_slots(kernel, data):
    pages, page_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    valid = data.draw(st.permutations(range(pages * page_size)))
    valid = valid[: data.draw(st.integers(0, len(valid)))]
    skipped = st.integers(-(1 << 63), -1) | st.integers(pages * page_size, (1 << 63) - 1)
    slots = data.draw(st.permutations(valid + data.draw(st.lists(skipped, max_size=4))))
    if not slots:
        slots = [-1]
    kv_cache = torch.full((pages, page_size, 1, 160), float("nan"))
    check(
        kernel,
        kv_cache,
        *make_tokens(len(slots), 128, 32, torch.float32, True),
        torch.tensor(slots),
    )


@pytest.mark.parametrize("pages", [0, 3])
@pytest.mark.parametrize("count", [0, 2])
def test_empty_pools_and_no_tokens(pages, count):
    kv_cache = torch.full((pages, 2, 1, 160), 7.0)
    slots = torch.full((count,), -1)
    check("operator", kv_cache, *make_tokens(count, 128, 32, torch.float32, False), slots)


@pytest.mark.parametrize("kernel", KERNELS)
def test_appends_nan_and_infinity_as_they_are(kernel):
    kv_cache = torch.zeros(2, 2, 1, 160)
    kv_c, k_pe = torch.full((1, 128), float("nan")), torch.full((1, 32), -float("inf"))
    check(kernel, kv_cache, kv_c, k_pe, torch.tensor([3]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_slot_of_a_view_of_a_pool_stays_in_the_view(kernel):
    memory = torch.randn(6, 4, 1, 160)
    check(
        kernel,
        memory[2:4],
        *make_tokens(3, 128, 32, torch.float32, False),
        torch.tensor([8, 0, -1]),
    )


def test_no_tokens_with_strides_that_contiguous_keeps():
    """Symptom: an empty batch was refused, "call .contiguous()", which changes nothing here."""
    nothing = torch.empty(0, 1).expand(0, 128)
    assert nothing.contiguous().stride(1) == 0
    check("operator", torch.ones(3, 2, 1, 160), nothing, nothing[:, :32], torch.empty(0).long())
