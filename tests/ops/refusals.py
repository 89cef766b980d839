"""How to call every operator rightly, and the changes that make a call wrong.

``B = 3, S = 2, H = 4, D = 128 + 32, N = 5, P = 4, M = 6, n = 4, K = 2``: no two sizes that can be
confused are equal. Changes use only what a fake CUDA tensor can do without CUDA.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_ops import MLAMetadata, append_kv_, merge_states, mla_decode, mla_metadata

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I32, I64 = torch.int32, torch.int64


class Refusal(NamedTuple):
    op: str
    id: str
    change: Callable  # good arguments -> the arguments that are different
    error: type[Exception]
    message: str  # up to "got", numbers and devices are compared as such


def metadata(
    *, cache_seqlens, topk_length=None, tile_scheduler_metadata=None, num_splits=None, **options
):
    out = None
    if num_splits is not None:
        out = MLAMetadata(tile_scheduler_metadata, num_splits)
    return mla_metadata(cache_seqlens, topk_length=topk_length, out=out, **options)


def decode(*, tile_scheduler_metadata=None, num_splits=None, **arguments):
    plan = None
    if tile_scheduler_metadata is not None or num_splits is not None:
        plan = (tile_scheduler_metadata, num_splits)
    return mla_decode(metadata=plan, **arguments)


FUNCTIONS = {
    "mla_metadata": metadata,
    "mla_metadata_out": metadata,
    "append_kv_": append_kv_,
    "mla_decode": decode,
    "mla_decode_out": decode,
    "merge_states": merge_states,
}
MUTATED = {
    "mla_metadata_out": ("tile_scheduler_metadata", "num_splits"),
    "append_kv_": ("kv_cache",),
    "mla_decode_out": ("out", "lse"),
}


def good_arguments(op, device="cpu"):
    def zeros(*shape, dtype=F32):
        return torch.zeros(shape, dtype=dtype, device=device)

    plan = {
        "tile_scheduler_metadata": zeros(7, 8, dtype=I32),
        "num_splits": zeros(4, dtype=I32),
    }
    lengths = {"cache_seqlens": zeros(3, dtype=I32)}
    scheduled = {"num_heads_q": 4, "seqlen_q": 2, "topk": 9, "topk_length": zeros(3, dtype=I32)}
    attention = {
        "q": zeros(3, 2, 4, 160),
        "kv_cache": zeros(5, 4, 1, 160),
        "block_table": zeros(3, 6, dtype=I32),
        **lengths,
        **plan,
        "softmax_scale": 0.1,
        "head_dim_v": 128,
        "attn_sink": zeros(4),
    }
    return {
        "mla_metadata": lambda: {**lengths, **scheduled},
        "mla_metadata_out": lambda: {**lengths, **scheduled, **plan},
        "append_kv_": lambda: {
            "kv_cache": zeros(5, 4, 1, 160),
            "kv_c": zeros(3, 128),
            "k_pe": zeros(3, 32),
            "slot_mapping": torch.arange(3, device=device),
        },
        "mla_decode": lambda: attention,
        "mla_decode_out": lambda: {**attention, "out": zeros(3, 2, 4, 128), "lse": zeros(3, 4, 2)},
        "merge_states": lambda: {"outs": zeros(2, 3, 2, 4, 128), "lses": zeros(2, 3, 4, 2)},
    }[op]()


def shaped(name, *shape):
    return lambda a: {name: a[name].new_zeros(shape)}


def typed(name, dtype):
    return lambda a: {name: torch.zeros_like(a[name], dtype=dtype)}


def elsewhere(name):
    def change(a):
        device = "meta" if a[name].device.type == "cpu" else "cpu"
        return {name: torch.zeros(a[name].shape, dtype=a[name].dtype, device=device)}

    return change


def gappy(name):
    """The right shape, but the last stride is 2."""

    def change(a):
        *leading, last = a[name].shape
        return {name: a[name].new_zeros((*leading, last, 2)).select(-1, 0)}

    return change


def gappy_first(name):
    """The right shape and last stride, but rows lie apart."""

    def change(a):
        first, *others = a[name].shape
        return {name: a[name].new_zeros((first, 2, *others)).select(1, 0)}

    return change


def expanded(name):
    return lambda a: {name: a[name].narrow(0, 0, 1).expand(a[name].shape)}


def sharing(written, read):
    """Place two arguments of one dtype in one memory, overlapping by all but one element."""

    def change(a):
        first, second = a[written], a[read]
        memory = first.new_zeros(first.numel() + second.numel())
        return {
            written: memory.narrow(0, 0, first.numel()).view(first.shape),
            read: memory.narrow(0, 1, second.numel()).view(second.shape),
        }

    return change


def given(**values):
    return lambda a: values


def tensor(name):
    """An argument that must be None."""
    return lambda a: {
        name: next(v for v in a.values() if isinstance(v, torch.Tensor)).new_zeros(1)
    }


def own(op, *pairs):
    template = f"{op}: {{0}} must be in memory of its own, got memory shared with {{1}}"
    return [
        (f"{w}-shares-{r}", sharing(w, r), ValueError, template.format(w, r)) for w, r in pairs
    ]


def devices(op, like, *names):
    return [
        (f"{n}-device", elsewhere(n), ValueError, f"{op}: {n} must be on cpu like {like}")
        for n in names
    ]


def retyped(op, dtype, *names):
    wrong = F32 if dtype == "int32" else I32
    return [
        (f"{n}-dtype", typed(n, wrong), TypeError, f"{op}: {n} must be {dtype}") for n in names
    ]
