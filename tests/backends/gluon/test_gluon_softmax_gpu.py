"""The online softmax of the Gluon decode: rising maxima, absent pages, any scale, NaN keys."""

import math

import pytest
import torch

pytest.importorskip("triton")

from gluon_calls import RAGGED, SCALE, block_of, check, problem, run, tiles_of_a_part

from mla_ops.backends.gluon import softmax_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

# Powers of two by which weights may exceed 1 before a block rescales what it summed.
SLACK = softmax_kernels._SLACK.value
# Tiles of a part where maxima rise.
PART = 16


def keys_of(call, sequence):
    """Return where the tokens of a sequence lie: indices into the cache."""
    _, kv_cache, block_table, cache_seqlens = call
    at = torch.arange(int(cache_seqlens[sequence]), device=kv_cache.device)
    return block_table[sequence, at // kv_cache.shape[1]].long(), at % kv_cache.shape[1], 0


def long_sequences(call):
    """Return the sequences that have parts of 16 tiles."""
    return [b for b, length in enumerate(call[3].tolist()) if length >= PART * 64]


def rising(call, steps):
    """Let the scores of a part's tile t rise by 1.56 * ``steps[t]`` powers of two.

    For some heads by half of that or not at all. The last element of q and of the keys does it,
    which is no value; what is random in the scores stays within a few powers of two.
    """
    q, kv_cache, _, cache_seqlens = call
    kv_cache *= 0.25
    q[..., -1] = torch.tensor([8, 4, 0, 8]).repeat(q.shape[2] // 4)
    last = torch.tensor(steps).repeat_interleave(64).to(kv_cache)
    for sequence in long_sequences(call):
        parts = int(cache_seqlens[sequence]) // len(last)
        kv_cache[(*keys_of(call, sequence), -1)] = last.repeat(parts)
    return call


def tile_maxima(call, row_tile):
    """Return the rows' maxima over each tile of each part, as powers of two."""
    q, kv_cache, _, _ = call
    maxima = []
    for sequence in long_sequences(call):
        keys = kv_cache[keys_of(call, sequence)].float()
        scores = q[sequence].flatten(0, 1).float() @ keys.T * (SCALE * math.log2(math.e))
        maxima.append(scores.view(-1, row_tile, len(keys) // 64 // PART, PART, 64).amax(-1))
    return torch.stack(maxima).movedim(-1, 0)  # [PART, B, groups, row_tile, parts]


def count_rescales(maxima):
    """Count each block's rescales: at a tile where a row exceeds its stale maximum by SLACK."""
    stale, count = maxima[0], 0
    for tile in maxima[1:]:
        above = (tile - stale > SLACK).any(2, keepdim=True)
        stale = torch.where(above, torch.maximum(stale, tile), stale)
        count = count + above.int()
    return count


# Beyond 2**15 at every tile; within it from tile to tile, and beyond at each second; once after a
# long rest; never. Those that rise do so by more than 2**128, what float32 and bfloat16 hold.
RISES = {
    "fast": ([13 * t for t in range(PART)], PART - 1),
    "slow": ([6 * t for t in range(PART)], (PART - 1) // 2),
    "late": ([0] * (PART - 2) + [90] * 2, 1),
    "falling": ([195 - 13 * t for t in range(PART)], 0),
}
# Blocks of each kind and how many tiles they take: a part of 16; with the long plan, of more than
# 1024 sequences, seven of one tile each as well.
RISING = [
    ({"lengths": [31 * 1024] * 4, "heads": 16}, (16, 4), 16),
    ({"lengths": [4096] * 33, "heads": 32}, (32, 4), 16),
    ({"lengths": ([1024] + [64] * 7) * 132, "heads": 32, "page_size": 16}, (32, 8), 23),
    ({"lengths": [2048] * 66, "heads": 64}, (64, 8), 16),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize(
    ("shape", "block", "tiles"), RISING, ids=[f"N{c[1][0]}-{c[1][1]}warps" for c in RISING]
)
def test_rising_maxima(shape, block, tiles, rise, dtype):
    """Not rescaled, weights overflow in any dtype; if only m is, old tiles weigh too much."""
    steps, rescales = RISES[rise]
    call = rising(problem(**shape, dtype=dtype), steps)
    assert block_of(call) == block
    assert tiles_of_a_part(call) == tiles
    maxima = tile_maxima(call, block[0])
    assert (count_rescales(maxima) == rescales).all()
    if rise == "slow":
        assert maxima.diff(dim=0).max() < SLACK
    if rescales:
        # In each block a row rises so far that, relative to its first maximum, it overflows.
        assert (maxima[-1] - maxima[0]).amax(2).min() > 128
    check(*call)


@pytest.mark.parametrize(
    ("lengths", "heads", "block", "tiles"),
    [
        ([8000] * 4, 16, (16, 4), 8),
        ([1000] * 132, 16, (32, 4), 16),
        ([1000] * 132, 32, (64, 8), 16),
    ],
    ids=["N16-parts", "N32-whole", "N64-whole"],
)
def test_rows_first_seen_behind_absent_pages(lengths, heads, block, tiles):
    """A part's first three tiles are absent: of a maximum of -inf all its weights would be NaN."""
    call = problem(lengths, heads=heads, seqlen_q=2)
    assert block_of(call) == block
    assert tiles_of_a_part(call) == tiles
    call[2][:, :3] = -1
    call[2][:, tiles : tiles + 3] = -1
    check(*call, causal=True)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-45, -0.05, -3.0, 3.0])
def test_any_scale(scale, heads):
    check(*problem(RAGGED, heads=heads, seqlen_q=2), causal=True, scale=scale)


# Sequences, and tokens of one of them: in one of its parts, in several, in all; in a part's first
# tile and in later ones.
SPOILED = {
    "part": ([8000] * 4, [330]),
    "parts": ([8000] * 4, [0, 63, 330, 4000, 7999]),
    "all": ([8000] * 4, range(8000)),
    "packed": (RAGGED, [4096]),
    "whole": ([1000] * 132, [0]),
    "whole-late": ([1000] * 132, [999]),
}


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("spoiled", SPOILED)
def test_nan_keys_give_nan(spoiled, heads):
    """A NaN that a sequence sees was lost, and its lse finite, where a maximum passes over it."""
    lengths, tokens = SPOILED[spoiled]
    call = problem(lengths, heads=heads)
    whole = len(lengths) == 132
    assert block_of(call) == ((16, 4) if heads == 16 else (64, 8) if whole else (32, 4))
    if whole:
        assert tiles_of_a_part(call) == 16
    out, lse = run(*call)
    victim = lengths.index(4097) if spoiled == "packed" else 2
    page, slot, _ = keys_of(call, victim)
    # The last element of a key is no value: only the weight can bring it to out.
    call[1][page[list(tokens)], slot[list(tokens)], 0, -1] = float("nan")
    out_nan, lse_nan = run(*call)
    assert out_nan[victim].isnan().all()
    assert lse_nan[victim].isnan().all()
    others = torch.arange(len(lengths)) != victim
    assert torch.equal(out_nan[others], out[others])
    assert torch.equal(lse_nan[others], lse[others])
