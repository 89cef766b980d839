"""Pools past 2^31 and 2^32 elements, strided caches and queries, pages and slots outside."""

import hopper
import pytest
import torch

import mla_ops
from mla_ops.testing.inputs import make_decode_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

PAGE_ELEMENTS = 64 * 576
BACKENDS = ["flash_mla", "triton"]


@pytest.fixture(scope="module")
def big_pool():
    """117,000 pages, 4.3e9 elements, 8.6 GB: past 2^31 and 2^32 elements, 2^31 and 2^32 bytes."""
    pool = torch.zeros((117_000, 64, 1, 576), dtype=torch.bfloat16, device="cuda")
    yield pool
    del pool


def crossings(pages):
    """Return the pages around every power of two that an offset may wrap at."""
    edges = [2**power // PAGE_ELEMENTS for power in (29, 30, 31, 32)]
    near = {page for edge in edges for page in (edge - 1, edge, edge + 1) if page < pages}
    return sorted(near | {0, 1, pages - 1})


@pytest.mark.parametrize("pages", [60_000, 117_000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_append_and_decode_where_offsets_wrap(big_pool, backend, pages):
    pool = big_pool[:pages]
    pool.zero_()
    used = crossings(pages)
    numbers = torch.tensor(used, device="cuda")
    slots = (numbers[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
    slots = slots[torch.randperm(slots.numel(), device="cuda")]
    tokens = torch.randn((slots.numel(), 576), dtype=torch.bfloat16, device="cuda")
    mla_ops.append_kv_(pool, tokens[:, :512], tokens[:, 512:], slots)
    written = pool[numbers].view(-1, 576)
    expected = torch.empty_like(written)
    position = {page: place for place, page in enumerate(used)}
    places = torch.tensor(
        [position[int(slot) // 64] * 64 + int(slot) % 64 for slot in slots.cpu()]
    )
    expected[places.cuda()] = tokens
    assert torch.equal(written, expected)
    # Nothing else was touched: a wrapped offset lands in a page that is zeros.
    nonzero = sum(int(chunk.count_nonzero()) for chunk in pool.split(10_000))
    assert nonzero == int(tokens.count_nonzero())

    table = numbers.int().flip(0)[None].repeat(3, 1)
    table[1] = table[1].roll(5)
    lengths = torch.tensor([len(used) * 64, len(used) * 64 - 63, 65], device="cuda").int()
    q = torch.randn((3, 2, 16, 576), dtype=torch.bfloat16, device="cuda")
    metadata = mla_ops.mla_metadata(lengths, num_heads_q=16, seqlen_q=2)
    out, lse = mla_ops.mla_decode(
        *(q, pool, table, lengths, metadata), softmax_scale=hopper.SCALE, backend=backend
    )
    hopper.check(q, pool, table, lengths, out, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("padded", ["rows", "pages", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_caches(backend, padded, seqlen_q, dtype):
    inputs = make_decode_inputs(
        (0, 1, 63, 64, 65, 700),
        seqlen_q=seqlen_q,
        num_heads_q=17,
        dtype=dtype,
        strided_q=True,
        padded_rows=padded != "pages",
        padded_pages=padded != "rows",
        softmax_scale=hopper.SCALE,
        device="cuda",
    )
    assert not inputs.kv_cache.is_contiguous()
    check_decode(inputs, backend)


@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize("offset", [0, 8, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_q_sliced_from_a_fused_projection(backend, offset, seqlen_q):
    """Offset 3 is no multiple of 16 bytes: TMA cannot read it where it lies."""
    inputs = make_decode_inputs(
        (1, 64, 300), seqlen_q=seqlen_q, softmax_scale=hopper.SCALE, device="cuda"
    )
    width = 16 * 576
    shape = (3, seqlen_q, width + 640)
    projection = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    q = projection[..., offset : offset + width].unflatten(-1, (16, 576))
    q.copy_(inputs.q)
    check_decode(inputs._replace(q=q), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_tables_and_sliced_rows(backend):
    inputs = make_decode_inputs((70, 1, 200), spare_columns=900, device="cuda")
    inputs = inputs._replace(softmax_scale=hopper.SCALE)
    wide = torch.full((5, 2000), 2147480000, dtype=torch.int32, device="cuda")
    table = wide[1:4, 7 : 7 + inputs.block_table.shape[1]]
    table.copy_(inputs.block_table)
    check_decode(inputs._replace(block_table=table), backend)


def check_decode(inputs, backend, **options):
    q, seqlen_q, heads = inputs.q, inputs.q.shape[1], inputs.q.shape[2]
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=heads, seqlen_q=seqlen_q)
    out = torch.full((*q.shape[:3], 512), float("nan"), dtype=q.dtype, device="cuda")
    lse = torch.full((q.shape[0], heads, seqlen_q), float("nan"), device="cuda")
    for given in ({}, {"out": out, "lse": lse}):
        result = mla_ops.mla_decode(
            *(*inputs[:4], metadata),
            softmax_scale=inputs.softmax_scale,
            backend=backend,
            **given,
        )
        hopper.check(*inputs[:4], *result, **options)
        assert result.lse.stride() == lse.stride() or not given


@pytest.mark.parametrize("page", [-1, -2147483648, "N", 2147480000, 2147483647])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_outside_the_pool_read_and_write_nothing(backend, page):
    """flash_mla reads them as zeros, the others as absent; neither touches memory around."""
    guarded = hopper.Guarded()
    inputs = make_decode_inputs((300, 64, 500, 0), device="cuda")
    page = inputs.kv_cache.shape[0] if page == "N" else page
    inputs.block_table[0, 1] = page
    inputs.block_table[2, 0] = page
    inputs.block_table[3] = page
    q, kv_cache, table, lengths = (guarded(tensor) for tensor in inputs[:4])
    metadata = mla_ops.mla_metadata(
        *(lengths,),
        num_heads_q=16,
        out=tuple(guarded(t) for t in mla_ops.mla_metadata(lengths, num_heads_q=16)),
    )
    out = guarded(torch.full((4, 1, 16, 512), float("nan"), dtype=q.dtype, device="cuda"))
    lse = guarded(torch.full((4, 16, 1), float("nan"), device="cuda"))
    mla_ops.mla_decode(
        *(q, kv_cache, table, lengths, metadata),
        softmax_scale=hopper.SCALE,
        backend=backend,
        out=out,
        lse=lse,
    )
    torch.cuda.synchronize()
    guarded.check()
    for mine, original in zip((kv_cache, table, lengths), inputs[1:4], strict=True):
        assert torch.equal(mine.view(torch.uint8), original.view(torch.uint8))
    zero = backend == "flash_mla"
    hopper.check(q, kv_cache, table, lengths, out, lse, zero_pages=zero)


def test_slots_outside_the_pool_write_nothing():
    guarded = hopper.Guarded()
    pages = 5
    pool = guarded(torch.zeros((pages, 64, 1, 576), dtype=torch.bfloat16, device="cuda"))
    outside = [-1, -64, pages * 64, pages * 64 + 1, 2**31, 2**40, -(2**40), 2**63 - 1, -(2**63)]
    slots = torch.tensor([*outside, 7], device="cuda")
    tokens = torch.ones((slots.numel(), 576), dtype=torch.bfloat16, device="cuda")
    mla_ops.append_kv_(pool, tokens[:, :512], tokens[:, 512:], slots)
    torch.cuda.synchronize()
    guarded.check()
    assert int(pool.count_nonzero()) == 576
    assert (pool[0, 7] == 1).all()
    mla_ops.append_kv_(pool, tokens[:-1, :512], tokens[:-1, 512:], slots[:-1])
    guarded.check()
    assert int(pool.count_nonzero()) == 576


def test_misaligned_cache_is_refused_or_right(flash_mla):
    inputs = make_decode_inputs((1, 64, 300), softmax_scale=hopper.SCALE, device="cuda")
    memory = torch.empty(inputs.kv_cache.numel() + 1, dtype=torch.bfloat16, device="cuda")
    kv_cache = memory[1:].view(inputs.kv_cache.shape).copy_(inputs.kv_cache)
    moved = inputs._replace(kv_cache=kv_cache)
    with pytest.raises(
        mla_ops.BackendUnavailableError, match="kv_cache must begin at a multiple of 16 bytes"
    ):
        check_decode(moved, flash_mla)
    check_decode(moved, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_pool(backend):
    """The slots past a length and the pages nobody owns hold NaN and infinity."""
    for poison in (float("nan"), float("inf"), float("-inf")):
        inputs = make_decode_inputs(
            *((0, 1, 63, 65, 129),),
            seqlen_q=2,
            num_heads_q=16,
            poison=poison,
            softmax_scale=hopper.SCALE,
            device="cuda",
        )
        check_decode(inputs, backend)


@pytest.mark.parametrize("length", [1000, 2**30])
def test_lengths_beyond_the_table_are_capped_without_a_schedule(flash_mla, length):
    inputs = make_decode_inputs(
        (64, 128), spare_columns=0, softmax_scale=hopper.SCALE, device="cuda"
    )
    table = inputs.block_table[:, :1].contiguous()
    lengths = torch.full_like(inputs.cache_seqlens, length)
    out, lse = mla_ops.mla_decode(
        *(inputs.q, inputs.kv_cache, table, lengths),
        softmax_scale=hopper.SCALE,
        backend=flash_mla,
    )
    hopper.check(inputs.q, inputs.kv_cache, table, lengths.clamp(max=64), out, lse)
