"""Weight absorption: move kv_b_proj from the cached keys to the queries and the outputs.

``q_nope . (W_UK c) = (W_UK^T q_nope) . c`` and ``sum_t p_t (W_UV c_t) = W_UV sum_t p_t c_t``: the
attention then runs on the cached latents c themselves, and kv_b_proj costs the same for a cache
of one token and of a hundred thousand.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["absorb_q", "expand_out", "expand_wide_out", "split_kv_b"]


def split_kv_b(
    weight: Tensor, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Tensor, Tensor]:
    """View the weight of kv_b_proj as the up-projections of every head's keys and values.

    Args:
        weight: [H * (nope + v), latent], as in a checkpoint.
        num_heads: H.
        qk_nope_head_dim: width of a key without its rope.
        v_head_dim: width of a value.

    Returns:
        ``(w_uk [H, nope, latent], w_uv [H, v, latent])``: views, no copy of the weight.

    Raises:
        ValueError: the rows are not H * (nope + v).
    """
    width = qk_nope_head_dim + v_head_dim
    if weight.dim() != 2 or weight.shape[0] != num_heads * width:
        raise ValueError(
            f"split_kv_b: weight must be [H * (nope + v), latent] with {num_heads * width} rows, "
            f"got shape {tuple(weight.shape)} (pass kv_b_proj.weight and this rank's num_heads)"
        )
    per_head = weight.view(num_heads, width, -1)
    return (
        per_head.narrow(1, 0, qk_nope_head_dim),
        per_head.narrow(1, qk_nope_head_dim, v_head_dim),
    )


def absorb_q(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Project queries [..., H, nope] to the latent space of the cache, [..., H, latent]."""
    return torch.einsum("...hn,hnl->...hl", q_nope, w_uk)


def expand_out(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Project attention over latents [..., H, latent] to values, [..., H, v]."""
    return torch.einsum("...hl,hvl->...hv", out_latent, w_uv)


def expand_wide_out(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Project float32 attention over latents to 16-bit values, rounding once at the end.

    On CUDA the latents are two 16-bit numbers each, their leading bits and the rest, so that one
    product on tensor cores reads the weight once, as it is, and keeps 15 bits of them or more;
    in float16 to an absolute 2**-25.

    Args:
        out_latent: [..., H, latent] float32, finite and within the range of w_uv's dtype.
        w_uv: [H, v, latent] bfloat16 or float16.

    Returns:
        [..., H, v] in the dtype of ``w_uv``.
    """
    if not out_latent.is_cuda:
        return expand_out(out_latent, w_uv.float()).to(w_uv.dtype)
    *leading, heads, latent = out_latent.shape
    rows = out_latent.reshape(-1, heads, latent).transpose(0, 1)  # [H, n, latent]
    parts = torch.cat(_halves(rows, w_uv.dtype), dim=1)  # [H, 2 n, latent]
    product = torch.bmm(parts, w_uv.transpose(1, 2), out_dtype=torch.float32)
    high, low = product.chunk(2, dim=1)
    return (high + low).to(w_uv.dtype).transpose(0, 1).reshape(*leading, heads, w_uv.shape[1])


def _halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into two of a 16-bit dtype whose sum they nearly are.

    The first is cut off, not converted: Inductor fuses ``x.to(dtype)`` into the subtraction
    without rounding it, and the second would be 0.
    """
    dropped = int(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    high = (x.view(torch.int32) & -dropped).view(torch.float32)
    return high.to(dtype), (x - high).to(dtype)
