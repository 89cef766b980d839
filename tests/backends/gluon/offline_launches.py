"""Launches of the Gluon kernels without a device, compiled or counted."""

import torch
from triton.backends.compiler import GPUTarget

from mla_ops.backends.gluon import decode


class OfflineDriver:
    """What Triton asks of a driver before it compiles, answered as on a Hopper device."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class CountOnly:
    """Stands for a kernel: a launch leaves its grid."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.grids.append(grid)


class CompileOnly:
    """Stands for a kernel: a launch compiles it with the launcher's own arguments."""

    def __init__(self, kernel):
        self.kernel, self.grids, self.compiled = kernel, [], []
        kernel.device_caches.clear()

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.grids.append(grid)
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


def launch(
    *,
    batch=1,
    heads=16,
    seqlen_q=1,
    page_size=64,
    rope=64,
    pages=200,
    dtype=torch.bfloat16,
    out=None,
    causal=False,
    sink=False,
    out_stride=1,
    q_padding=0,
    table_stride=None,
):
    """Call the launcher with tensors that nobody reads; return what it chose to compile."""
    rows, head_dim = (batch, seqlen_q, heads), 512 + rope
    q = torch.empty(*rows, head_dim + q_padding, dtype=dtype)[..., :head_dim]
    table = torch.empty_strided(
        (batch, pages), (table_stride or pages, 1), dtype=torch.int32, device="meta"
    )
    decode.mla_decode_out(
        q,
        q.new_empty(2, page_size, 1, head_dim),
        table,
        torch.empty(batch, dtype=torch.int32),
        None,
        None,
        torch.empty(*rows, 512 * out_stride, dtype=out or dtype)[..., ::out_stride],
        torch.empty(*rows).transpose(1, 2),
        softmax_scale=0.1,
        causal=causal,
        attn_sink=torch.empty(heads) if sink else None,
    )
    return decode.decode_config(batch, seqlen_q * heads, 132, capacity=pages * page_size)
