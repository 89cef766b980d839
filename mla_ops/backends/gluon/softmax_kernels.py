# mypy: disable-error-code="no-untyped-def,misc"
"""The online softmax of a tile: tokens lie along wgmma's M, so a query row is a column here."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_ops.backends.gluon.schedule_kernels import TILE

_BEYOND = gl.constexpr(2**30)
# Below every score, and finite: a masked one less it is still -inf.
_LOWEST = gl.constexpr(-3.4028234663852886e38)
# Powers of two by which weights may exceed 1: fp16 holds 2**15, and sums in float32 leave room for
# any value of fp16 and for those of bf16 below 2**80.
_SLACK = gl.constexpr(15.0)


@gluon.constexpr_function
def _every_warp(n):
    """Return the layout of [4, n] in which each thread holds all four rows of its columns."""
    columns = [[0, 1], *([0, 1 << bit] for bit in range(3, n.bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    registers = [[1, 0], [2, 0], *columns]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [4, n])


@gluon.constexpr_function
def _every_thread(n):
    """Return the layout of [n] in which each thread holds everything."""
    bits = n.bit_length() - 1
    registers = [[1 << bit] for bit in range(bits)]
    return gl.DistributedLinearLayout(registers, [[0]] * 5, [[0]] * bits, [], [n])


@gluon.jit
def _column_max(s, N: gl.constexpr, NW: gl.constexpr, score: gl.constexpr):
    if NW == 4:
        # Warps exchange their maxima in one pass through shared memory; gl.max takes two.
        own = gl.max(s.reshape((4, TILE // 4, N)), 1)
        every = gl.convert_layout(own, _every_warp(N))
        return gl.convert_layout(gl.max(every, 0), gl.SliceLayout(0, score))
    else:
        return gl.max(s, 0)


@gluon.jit
def _any_above(s, bound, N: gl.constexpr, NW: gl.constexpr):
    """Return whether any score of a tile is above a bound."""
    side: gl.constexpr = NW // 4
    # [warp, two rows, lane, warp, columns of a thread, lane, two columns]
    own = gl.max(s.reshape((4, 2, 8, side, N // side // 8, 4, 2)), 1)
    own = gl.max(gl.max(own, 5), 3).permute((0, 2, 1, 3)).reshape((NW, 32))
    any_of_warp = gl.max((own > bound).to(gl.int32), 1)
    return gl.max(gl.convert_layout(any_of_warp, _every_thread(NW)), 0) != 0


@gluon.jit
def _mask(
    s,
    tile,
    absent,
    limit,
    queries,
    masked,
    N: gl.constexpr,
    P: gl.constexpr,
    CAUSAL: gl.constexpr,
    score: gl.constexpr,
):
    """Mask the tokens at and behind a row's limit and those of absent pages."""
    if ((tile + 1) * TILE > limit) | (absent != 0):
        token = gl.arange(0, TILE, layout=gl.SliceLayout(1, score))
        if P >= TILE:
            position = token + gl.where(absent != 0, _BEYOND, tile * TILE)
        else:
            position = token + tile * TILE
            position = gl.where((absent >> (token // P)) & 1 != 0, _BEYOND, position)
        row_limit = gl.full([N], 0, gl.int32, layout=gl.SliceLayout(0, score)) + limit
        if CAUSAL:
            row_limit += queries.load(gl.SliceLayout(0, score))
        s = gl.where(position[:, None] < row_limit[None, :], s, masked)
    return s


@gluon.jit
def weigh_first(
    s,
    tile,
    absent,
    limit,
    queries,
    masked,
    qk_scale,
    N: gl.constexpr,
    NW: gl.constexpr,
    P: gl.constexpr,
    CAUSAL: gl.constexpr,
    score: gl.constexpr,
):
    """Turn the scores of a part's first tile into weights relative to each row's maximum.

    Returns:
        tuple: the weights, the maxima and the totals to go on with.
    """
    s = _mask(s, tile, absent, limit, queries, masked, N, P, CAUSAL, score) * qk_scale
    m = gl.maximum(_column_max(s, N, NW, score), _LOWEST)
    p = gl.exp2(s - m[None, :])
    return p, m, gl.sum(p.reshape((4, 2, 8, N)), 1)


@gluon.jit
def weigh(
    s,
    m,
    total,
    acc_left,
    acc_right,
    tile,
    absent,
    limit,
    queries,
    masked,
    qk_scale,
    N: gl.constexpr,
    NW: gl.constexpr,
    P: gl.constexpr,
    CAUSAL: gl.constexpr,
    score: gl.constexpr,
    accum_row: gl.constexpr,
):
    """Turn the scores of a later tile into weights; no product may be in flight.

    Weights are relative to ``m``, the rows' maxima at an earlier tile. Only when a score exceeds
    its row's by more than _SLACK are maxima looked for, and everything summed before is rescaled;
    most tiles are spared both.

    Returns:
        tuple: the weights, and m, the totals and the accumulators to go on with.
    """
    s = _mask(s, tile, absent, limit, queries, masked, N, P, CAUSAL, score)
    excess = s * qk_scale - m[None, :]
    p = gl.exp2(excess)
    if _any_above(excess, _SLACK, N, NW):
        s = s * qk_scale
        m_new = gl.maximum(m, _column_max(s, N, NW, score))
        p = gl.exp2(s - m_new[None, :])
        decay = gl.exp2(m - m_new)
        along: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout))
        total = total * gl.convert_layout(decay, along)[None, None, :]
        scale = gl.convert_layout(decay, accum_row)
        acc_left = acc_left * scale[None, :]
        acc_right = acc_right * scale[None, :]
        m = m_new
    total += gl.sum(p.reshape((4, 2, 8, N)), 1)
    return p, m, total, acc_left, acc_right


@gluon.jit
def totals_of(total, N: gl.constexpr, score: gl.constexpr):
    """Return the sum of each row's weights."""
    own = gl.sum(total, 1)
    if N == 16:
        own = gl.convert_layout(own, _every_warp(N))
    return gl.convert_layout(gl.sum(own, 0), gl.SliceLayout(0, score))
