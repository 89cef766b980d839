# mypy: disable-error-code="no-untyped-def,misc"
"""The products of a tile, started and not waited for.

Each ``warpgroup_mma`` is a group of its own: to wait for the sums of the left half is to let one
group be in flight, and ``begin_scores`` must start exactly one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from mla_ops.backends.gluon.schedule_kernels import TILE


@gluon.jit
def begin_scores(left, q_left, stage, zero, N: gl.constexpr, score: gl.constexpr):
    """Start S^T = K Q^T over the first half of the latent.

    ``zero`` is an index that the compiler cannot fold: with a constant one 36 wgmma descriptors of
    Q are kept in registers, and at 32 rows about a hundred words more are spilled.
    """
    query = q_left.index(zero).permute((1, 0))
    zeros = gl.zeros([TILE, N], gl.float32, layout=score)
    return warpgroup_mma(left.index(stage), query, zeros, use_acc=False, is_async=True)


@gluon.jit
def finish_scores(right, rope, q_right, q_tail, stage, zero, s, ROPE: gl.constexpr):
    """Start adding what the second half and the rope contribute."""
    query = q_right.index(zero).permute((1, 0))
    s = warpgroup_mma(right.index(stage), query, s, is_async=True)
    if ROPE > 0:
        query = q_tail.index(zero).permute((1, 0))
        s = warpgroup_mma(rope.index(stage), query, s, is_async=True)
    return s


@gluon.jit
def begin_sums(left, right, stage, weights, acc_left, acc_right):
    """Start O^T += V^T P^T, where V^T is a transposed view of the K tile."""
    value = left.index(stage).permute((1, 0))
    acc_left = warpgroup_mma(value, weights, acc_left, is_async=True)
    value = right.index(stage).permute((1, 0))
    acc_right = warpgroup_mma(value, weights, acc_right, is_async=True)
    return acc_left, acc_right
