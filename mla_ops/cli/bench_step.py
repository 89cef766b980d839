"""What benchmarks run: the decodes of a step, each with a pool of its own, on random values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mla_ops._torch import mark_static_address
from mla_ops.ops.decode import MLAOutput, mla_decode
from mla_ops.ops.metadata import MLAMetadata, mla_metadata
from mla_ops.shapes import DecodeShape, ceil_div

__all__ = ["PAGE_SIZE", "DecodeStep", "StepShape"]

PAGE_SIZE = 64


class StepShape(NamedTuple):
    """The sizes of a decode: B, H, tokens a sequence, D, V, the factor of the logits and S."""

    batch_size: int
    num_heads_q: int
    length: int
    head_dim: int = 576
    head_dim_v: int = 512
    softmax_scale: float = 0.135234
    seqlen_q: int = 1

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return ceil_div(self.length, PAGE_SIZE)

    @property
    def operations(self) -> int:
        """Floating-point operations of both matrix products."""
        rows = self.batch_size * self.seqlen_q * self.num_heads_q
        return 2 * rows * self.length * (self.head_dim + self.head_dim_v)

    def moved_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys: every one is read once, the rest is small beside them."""
        return self.batch_size * self.length * self.head_dim * dtype.itemsize

    def decode_shape(self, device: torch.device, dtype: torch.dtype) -> DecodeShape:
        """Return what backends look at to accept the call."""
        batch, _, _, head_dim, head_dim_v, _, seqlen_q = self
        return DecodeShape(
            *(device, dtype, dtype, batch, seqlen_q, self.num_heads_q, head_dim, head_dim_v),
            *(batch * self.pages, PAGE_SIZE, self.pages, PAGE_SIZE * head_dim, head_dim),
        )


class DecodeStep(nn.Module):
    """The decodes of one step over ``num_pools`` pools, shuffled pages, random values.

    The schedule is computed beforehand, as a model does once for all its layers.
    """

    kv: Tensor
    q: Tensor
    table: Tensor
    lengths: Tensor
    schedule: Tensor
    splits: Tensor

    def __init__(
        self, shape: StepShape, *, num_pools: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.backend = shape, "auto"
        batch, heads, length, head_dim, _, _, seqlen_q = shape
        sizes = (num_pools, batch * shape.pages, PAGE_SIZE, 1, head_dim)
        self._hold("kv", torch.randn(sizes, device=device, dtype=dtype))
        self._hold(
            "q", torch.randn((batch, seqlen_q, heads, head_dim), device=device, dtype=dtype)
        )
        pages = torch.randperm(batch * shape.pages, device=device).int()
        self._hold("table", pages.view(batch, shape.pages))
        self._hold("lengths", torch.full((batch,), length, dtype=torch.int32, device=device))
        schedule, splits = mla_metadata(self.lengths, num_heads_q=heads, seqlen_q=seqlen_q)
        self._hold("schedule", schedule)
        self._hold("splits", splits)

    def _hold(self, name: str, tensor: Tensor) -> None:
        # CUDA graphs copy an input on each replay unless its address is promised to stay.
        mark_static_address(tensor)
        self.register_buffer(name, tensor, persistent=False)

    def forward(self) -> list[MLAOutput]:
        """Decode over every pool with ``self.backend``.

        lse is returned too, so that it can be checked where it is timed.
        """
        return [self.decode(pool, self.backend) for pool in self.kv.unbind()]

    def decode(
        self, pool: Tensor, backend: str, out: Tensor | None = None, lse: Tensor | None = None
    ) -> MLAOutput:
        """Decode over one pool, into ``out`` and ``lse`` if they are given."""
        return mla_decode(
            *(self.q, pool, self.table, self.lengths, MLAMetadata(self.schedule, self.splits)),
            softmax_scale=self.shape.softmax_scale,
            head_dim_v=self.shape.head_dim_v,
            backend=backend,
            out=out,
            lse=lse,
        )
