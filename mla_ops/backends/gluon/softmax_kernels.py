# mypy: disable-error-code="no-untyped-def,misc"
"""The online softmax of a tile: tokens lie along wgmma's M, so a query row is a column here."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_ops.backends.gluon.schedule_kernels import TILE

_BEYOND = gl.constexpr(2**30)


@gluon.constexpr_function
def _every_warp(n):
    """Return the layout of [4, n] in which each thread holds all four rows of its columns."""
    columns = [[0, 1], *([0, 1 << bit] for bit in range(3, n.bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    registers = [[1, 0], [2, 0], *columns]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [4, n])


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
def no_total(N: gl.constexpr, score: gl.constexpr):
    """Return the zeros that ``weigh`` adds its weights to; half a tile's, as a thread adds two."""
    return gl.sum(gl.zeros([TILE, N], gl.float32, layout=score).reshape((4, 2, 8, N)), 1)


@gluon.jit
def weigh(
    s,
    m,
    total,
    tile,
    absent,
    limit,
    qk_scale,
    N: gl.constexpr,
    NW: gl.constexpr,
    P: gl.constexpr,
    score: gl.constexpr,
):
    """Turn the scores of a tile into weights; tokens at and behind ``limit`` have none.

    Returns:
        tuple: the weights, the factor of everything summed before, the new maxima and totals.
    """
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, score))
    if P >= TILE:
        position = token + gl.where(absent != 0, _BEYOND, tile * TILE)
    else:
        position = token + tile * TILE
        position = gl.where((absent >> (token // P)) & 1 != 0, _BEYOND, position)
    s = gl.where(position[:, None] < limit[None, :], s * qk_scale, -float("inf"))
    m_new = gl.maximum(m, _column_max(s, N, NW, score))
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    decay = gl.exp2(m - m_safe)
    p = gl.exp2(s - m_safe[None, :])
    along: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout))
    total = total * gl.convert_layout(decay, along)[None, None, :]
    total += gl.sum(p.reshape((4, 2, 8, N)), 1)
    return p, decay, m_new, total


@gluon.jit
def totals_of(total, score: gl.constexpr):
    """Return the sum of each row's weights."""
    return gl.convert_layout(gl.sum(gl.sum(total, 1), 0), gl.SliceLayout(0, score))
