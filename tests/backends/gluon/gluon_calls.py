"""Calls of the Gluon decode with hostile inputs, and their checks against the float64 oracle."""

import torch

from mla_ops._torch import streaming_multiprocessors
from mla_ops.backends import reference
from mla_ops.backends.gluon import decode
from mla_ops.testing.numerics import assert_close_to_fp64, assert_lse_close_to_fp64

RAGGED = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 4097, 3, 777]
SCALE = 0.135234
BEYOND = 2147480000


def problem(
    lengths,
    *,
    heads=16,
    seqlen_q=1,
    page_size=64,
    dtype=torch.bfloat16,
    rope=64,
    poison=float("nan"),
    padding=(0, 0),
):
    """Build a call: shuffled pages, a poisoned pool, a block table whose tail is no page."""
    torch.manual_seed(sum(lengths) + heads)
    head_dim = 512 + rope
    pages = [-(-length // page_size) for length in lengths]
    total = sum(pages) + 3
    row_padding, page_padding = padding
    storage = torch.randn(
        total, page_size + page_padding, 1, head_dim + row_padding, dtype=dtype, device="cuda"
    )
    kv_cache = storage[:, :page_size, :, :head_dim]
    order = torch.randperm(total)[: sum(pages)].int()
    table = torch.full((len(lengths), max(*pages, 1) + 2), BEYOND, dtype=torch.int32)
    used = torch.zeros(total, page_size, dtype=torch.bool)
    begin = 0
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        own = order[begin : begin + count]
        table[row, :count] = own
        used[own.long()] = (torch.arange(count * page_size) < length).view(count, page_size)
        begin += count
    kept = used.cuda()[:, :, None, None]
    kv_cache.copy_(torch.where(kept, kv_cache, poison))
    q = torch.randn(len(lengths), seqlen_q, heads, head_dim, dtype=dtype, device="cuda")
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return q, kv_cache, table.cuda(), cache_seqlens


def run(
    q,
    kv_cache,
    block_table,
    cache_seqlens,
    *,
    causal=False,
    attn_sink=None,
    out=None,
    scale=SCALE,
):
    batch, seqlen_q, heads, _ = q.shape
    if out is None:
        out = torch.full(
            (batch, seqlen_q, heads, 512), float("nan"), dtype=q.dtype, device=q.device
        )
    lse = torch.full((batch, seqlen_q, heads), float("nan"), device=q.device).transpose(1, 2)
    decode.mla_decode_out(
        *(q, kv_cache, block_table, cache_seqlens, None, None, out, lse),
        softmax_scale=scale,
        causal=causal,
        attn_sink=attn_sink,
    )
    return out, lse


def oracle(q, kv_cache, block_table, cache_seqlens, *, causal=False, attn_sink=None, scale=SCALE):
    batch, seqlen_q, heads, _ = q.shape
    out = torch.empty(batch, seqlen_q, heads, 512, dtype=torch.float64, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float64, device=q.device)
    keys = kv_cache.double()
    # The reference gathers the keys of all its sequences: not of a thousand of them at once.
    for some in torch.arange(batch).split(128):
        at = slice(int(some[0]), int(some[-1]) + 1)
        reference.mla_decode_out(
            *(q[at].double(), keys, block_table[at], cache_seqlens[at], None, None),
            *(out[at], lse[at]),
            softmax_scale=scale,
            causal=causal,
            attn_sink=attn_sink,
        )
    return out, lse


def check(*arguments, **options):
    out, lse = run(*arguments, **options)
    options.pop("out", None)
    expected, expected_lse = oracle(*arguments, **options)
    assert_close_to_fp64(out, expected)
    assert_lse_close_to_fp64(lse, expected_lse)
    for _ in range(2):
        again, lse_again = run(*arguments, **options)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


def config_of(q, kv_cache, block_table, cache_seqlens):
    """Return what the launcher chooses for a call."""
    batch, seqlen_q, heads, _ = q.shape
    return decode.decode_config(
        *(batch, seqlen_q * heads, streaming_multiprocessors(q.device)),
        capacity=block_table.shape[1] * kv_cache.shape[1],
    )


def block_of(call):
    """Return the rows and the warps of a call's blocks."""
    config = config_of(*call)
    return config.row_tile, config.decode_warps


def tiles_of_a_part(call):
    """Return how many tiles a block takes (schedule_kernels.py)."""
    workers = config_of(*call).workers
    tiles = [max(-(-length // 64), 1) for length in call[3].tolist()]
    share = -(-sum(tiles) // workers)
    quotas = [share + share * twelfth // 12 for twelfth in range(4)]
    return next((q for q in quotas if sum(-(-t // q) for t in tiles) <= workers), share)
