"""Every way to call an operator wrongly, once: what is changed in a good call, and the refusal.

``B = 3, S = 2, H = 4, D = 128 + 32, N = 5, P = 4, M = 6, n = 4, K = 2``: no two sizes that can be
confused are equal. Changes use only what a fake CUDA tensor can do without CUDA.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_ops import MLAMetadata, append_kv_, merge_states, mla_decode, mla_metadata

F32, I32, I64 = torch.float32, torch.int32, torch.int64
PAIRS = "((512, 64), (512, 0), (256, 64), (256, 32), (128, 32))"
BACKENDS = "('flash_mla', 'gluon', 'triton', 'cpu', 'reference')"
FLOATS = "float64, float32, bfloat16 or float16"


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


M = "mla_metadata: "
SCHEDULING = [
    *retyped("mla_metadata", "int32", "cache_seqlens", "topk_length"),
    ("rank", shaped("cache_seqlens", 3, 1), ValueError, M + "cache_seqlens must be contiguous [B]"),
    ("strided", gappy("cache_seqlens"), ValueError, M + "cache_seqlens must be contiguous [B]"),
    ("topk_length-rank", shaped("topk_length", 3, 1), ValueError,
     M + "topk_length must be contiguous [B]"),
    ("topk_length-batch", shaped("topk_length", 2), ValueError,
     M + "topk_length must be of shape (3,) on cpu like cache_seqlens"),
    ("topk_length-device", elsewhere("topk_length"), ValueError,
     M + "topk_length must be of shape (3,) on cpu like cache_seqlens"),
    ("topk_length-alone", given(topk=None), ValueError,
     M + "topk_length must be None for a dense decode"),
    ("topk-0", given(topk=0), ValueError, M + "topk must be >= 1"),
    ("num_heads_q-0", given(num_heads_q=0), ValueError, M + "num_heads_q must be >= 1"),
    ("num_heads_k-0", given(num_heads_k=0), ValueError, M + "num_heads_k must be >= 1"),
    ("num_heads_k-3", given(num_heads_k=3), ValueError,
     M + "num_heads_q must be a multiple of num_heads_k = 3"),
    ("seqlen_q-negative", given(seqlen_q=-1), ValueError, M + "seqlen_q must be >= 0"),
    ("schedule", given(schedule="best"), ValueError,
     M + "schedule must be one of ('auto', 'flash_mla', 'balanced')"),
    ("backend", given(backend="cuda"), ValueError, M + f"backend must be 'auto' or one of {BACKENDS}"),
]  # fmt: skip
SCHEDULING_ALLOCATING = [
    ("num_sm_parts-0", given(num_sm_parts=0), ValueError, M + "num_sm_parts must be >= 1"),
]
SCHEDULING_OUT = [
    *retyped("mla_metadata", "int32", "tile_scheduler_metadata", "num_splits"),
    *devices("mla_metadata", "cache_seqlens", "tile_scheduler_metadata", "num_splits"),
    ("rows-strided", gappy_first("tile_scheduler_metadata"), ValueError,
     M + "tile_scheduler_metadata must be contiguous"),
    ("splits-strided", gappy("num_splits"), ValueError, M + "num_splits must be contiguous"),
    *((f"rows-{'x'.join(map(str, shape))}", shaped("tile_scheduler_metadata", *shape), ValueError,
       M + "tile_scheduler_metadata must be [num_sm_parts, 8]")
      for shape in ((0, 8), (7, 7), (7, 9), (56,), (7, 8, 1))),
    *((f"splits-{'x'.join(map(str, shape))}", shaped("num_splits", *shape), ValueError,
       M + "num_splits must be [B + 1] = [4]") for shape in ((3,), (5,), (0,), (4, 1))),
    ("two-rows", given(num_sm_parts=6), ValueError, M + "out must be of num_sm_parts = 6 rows"),
    *own("mla_metadata", ("tile_scheduler_metadata", "num_splits"),
         ("tile_scheduler_metadata", "cache_seqlens"), ("num_splits", "cache_seqlens"),
         ("tile_scheduler_metadata", "topk_length"), ("num_splits", "topk_length")),
]  # fmt: skip

A = "append_kv_: "
POOL = "kv_cache must be [num_pages, page_size, 1, head_dim] with last stride 1"
APPEND = [
    ("kv_cache-dtype", typed("kv_cache", I32), TypeError, A + f"kv_cache must be {FLOATS}"),
    ("descale_k", tensor("descale_k"), ValueError, A + "descale_k must be None"),
    ("kv_cache-rank", shaped("kv_cache", 5, 4, 160), ValueError, A + POOL),
    ("kv_cache-heads", shaped("kv_cache", 5, 4, 2, 160), ValueError, A + POOL),
    ("kv_cache-strided", gappy("kv_cache"), ValueError, A + POOL),
    ("kv_cache-width", shaped("kv_cache", 5, 4, 1, 161), ValueError,
     A + "kv_c must be of width head_dim - rope = 129"),
    ("slot_mapping-dtype", typed("slot_mapping", I32), TypeError, A + "slot_mapping must be int64"),
    ("slot_mapping-rank", shaped("slot_mapping", 3, 1), ValueError,
     A + "slot_mapping must be contiguous [n]"),
    ("slot_mapping-strided", gappy("slot_mapping"), ValueError,
     A + "slot_mapping must be contiguous [n]"),
    *((f"{n}-dtype", typed(n, torch.bfloat16), TypeError,
       A + f"{n} must be torch.float32 like kv_cache") for n in ("kv_c", "k_pe")),
    *((f"{n}-{why}", shaped(n, *shape), ValueError,
       A + f"{n} must be [n, width] with one row per slot (n = 3)")
      for n, why, shape in (("kv_c", "rows", (4, 128)), ("k_pe", "rows", (2, 32)),
                            ("kv_c", "rank", (3, 1, 128)), ("k_pe", "rank", (96,)))),
    *((f"{n}-strided", gappy(n), ValueError, A + f"{n} must be last stride 1")
      for n in ("kv_c", "k_pe")),
    ("kv_c-width", shaped("kv_c", 3, 96), ValueError,
     A + "kv_c must be of width head_dim - rope = 128"),
    *devices("append_kv_", "kv_cache", "kv_c", "k_pe", "slot_mapping"),
    ("kv_cache-expanded", expanded("kv_cache"), ValueError,
     A + "kv_cache must be without overlapping elements"),
    *own("append_kv_", ("kv_cache", "kv_c"), ("kv_cache", "k_pe")),
]  # fmt: skip

D = "mla_decode: "
DECODE = [
    ("descale_q", tensor("descale_q"), ValueError, D + "descale_q must be None"),
    ("descale_k", tensor("descale_k"), ValueError, D + "descale_k must be None"),
    ("q-dtype", typed("q", I32), TypeError, D + f"q must be {FLOATS}"),
    ("kv_cache-dtype", typed("kv_cache", torch.bfloat16), TypeError,
     D + "kv_cache must be torch.float32 like q"),
    ("q-rank", shaped("q", 3, 4, 160), ValueError, D + "q must be [B, S, H, D] with last stride 1"),
    ("q-strided", gappy("q"), ValueError, D + "q must be [B, S, H, D] with last stride 1"),
    ("kv_cache-rank", shaped("kv_cache", 5, 4, 160), ValueError, D + POOL),
    ("kv_cache-heads", shaped("kv_cache", 5, 4, 2, 160), ValueError, D + POOL),
    ("kv_cache-strided", gappy("kv_cache"), ValueError, D + POOL),
    ("kv_cache-page_size", shaped("kv_cache", 5, 0, 1, 160), ValueError,
     D + "kv_cache must be of page_size >= 1"),
    ("q-width", shaped("q", 3, 2, 4, 128), ValueError, D + "q must be of head_dim 160 like kv_cache"),
    ("head_dim_v", given(head_dim_v=96), ValueError,
     D + f"head_dim_v must be the latent of a supported (latent, rope) pair {PAIRS}"),
    ("q-129-heads", shaped("q", 3, 2, 129, 160), ValueError, D + "q must be of 1 to 128 heads"),
    ("q-0-heads", shaped("q", 3, 2, 0, 160), ValueError, D + "q must be of 1 to 128 heads"),
    ("q-9-tokens", shaped("q", 3, 9, 4, 160), ValueError,
     D + "q must be of at most 8 tokens a sequence"),
    *retyped("mla_decode", "int32", "block_table", "cache_seqlens", "tile_scheduler_metadata",
             "num_splits"),
    ("block_table-int64", typed("block_table", I64), TypeError, D + "block_table must be int32"),
    *((f"{n}-{why}", shaped(n, *shape), ValueError, D + f"{n} must be {layout} with B = 3 like q")
      for n, layout, why, shape in (
          ("block_table", "[B, M]", "batch", (2, 6)), ("block_table", "[B, M]", "rank", (3,)),
          ("cache_seqlens", "[B]", "batch", (4,)), ("cache_seqlens", "[B]", "rank", (3, 1)))),
    *((f"{n}-strided", gappy(n), ValueError, D + f"{n} must be last stride 1")
      for n in ("block_table", "cache_seqlens")),
    *devices("mla_decode", "q", "kv_cache", "block_table", "cache_seqlens",
             "tile_scheduler_metadata", "num_splits", "attn_sink"),
    ("attn_sink-dtype", typed("attn_sink", torch.float64), TypeError,
     D + "attn_sink must be float32"),
    *((f"attn_sink-{why}", change, ValueError, D + "attn_sink must be contiguous [H] = [4]")
      for why, change in (("heads", shaped("attn_sink", 5)), ("rank", shaped("attn_sink", 4, 1)),
                          ("strided", gappy("attn_sink")))),
    *((f"{n}-alone", given(**{other: None}), ValueError,
       D + "metadata must be (tile_scheduler_metadata, num_splits)")
      for n, other in (("rows", "num_splits"), ("splits", "tile_scheduler_metadata"))),
    ("rows-strided", gappy_first("tile_scheduler_metadata"), ValueError,
     D + "tile_scheduler_metadata must be contiguous"),
    ("splits-strided", gappy("num_splits"), ValueError, D + "num_splits must be contiguous"),
    *((f"splits-{'x'.join(map(str, shape))}", shaped("num_splits", *shape), ValueError,
       D + "num_splits must be [B + 1] = [4]") for shape in ((3,), (5,), (4, 1))),
    *((f"rows-{'x'.join(map(str, shape))}", shaped("tile_scheduler_metadata", *shape), ValueError,
       D + "tile_scheduler_metadata must be [T, 8] with 1 <= T <= 132 for num_heads_q=4, "
       "seqlen_q=2") for shape in ((0, 8), (133, 8), (7, 7), (56,))),
    ("backend", given(backend="cuda"), ValueError, D + f"backend must be 'auto' or one of {BACKENDS}"),
]  # fmt: skip
DECODE_FUNCTIONAL = [
    ("only-out", lambda a: {"out": a["q"]}, ValueError,
     D + "out and lse must be given both or neither"),
    ("only-lse", lambda a: {"lse": a["q"]}, ValueError,
     D + "out and lse must be given both or neither"),
]  # fmt: skip
DECODE_OUT = [
    ("out-dtype", typed("out", torch.bfloat16), TypeError, D + "out must be torch.float32"),
    ("lse-dtype", typed("lse", torch.float64), TypeError, D + "lse must be torch.float32"),
    ("out-width", shaped("out", 3, 2, 4, 160), ValueError,
     D + "out must be [B, S, H, V] = (3, 2, 4, 128)"),
    ("out-rank", shaped("out", 6, 4, 128), ValueError,
     D + "out must be [B, S, H, V] = (3, 2, 4, 128)"),
    ("out-batch", shaped("out", 4, 2, 4, 128), ValueError,
     D + "out must be [B, S, H, V] = (3, 2, 4, 128)"),
    ("lse-order", shaped("lse", 3, 2, 4), ValueError, D + "lse must be [B, H, S] = (3, 4, 2)"),
    *devices("mla_decode", "q", "out", "lse"),
    ("out-expanded", expanded("out"), ValueError, D + "out must be without overlapping elements"),
    ("lse-expanded", expanded("lse"), ValueError, D + "lse must be without overlapping elements"),
    *own("mla_decode", ("out", "lse"), ("out", "q"), ("out", "kv_cache"), ("lse", "q"),
         ("lse", "kv_cache"), ("out", "attn_sink"), ("lse", "attn_sink")),
]  # fmt: skip

G = "merge_states: "
MERGE = [
    ("outs-dtype", typed("outs", I32), TypeError, G + f"outs must be {FLOATS}"),
    ("lses-dtype", typed("lses", torch.float64), TypeError, G + "lses must be float32"),
    ("outs-rank", shaped("outs", 2, 3, 2, 512), ValueError,
     G + "outs must be [K, B, S, H, V] with K >= 1"),
    ("no-shards", lambda a: {"outs": a["outs"].narrow(0, 0, 0), "lses": a["lses"].narrow(0, 0, 0)},
     ValueError, G + "outs must be [K, B, S, H, V] with K >= 1"),
    ("lses-order", shaped("lses", 2, 3, 2, 4), ValueError,
     G + "lses must be [K, B, H, S] = (2, 3, 4, 2)"),
    ("lses-shards", shaped("lses", 1, 3, 4, 2), ValueError,
     G + "lses must be [K, B, H, S] = (2, 3, 4, 2)"),
    ("lses-rank", shaped("lses", 2, 3, 8), ValueError,
     G + "lses must be [K, B, H, S] = (2, 3, 4, 2)"),
    *devices("merge_states", "outs", "lses"),
]  # fmt: skip

REFUSALS = [
    Refusal(op, *entry)
    for op, entries in {
        "mla_metadata": [*SCHEDULING, *SCHEDULING_ALLOCATING],
        "mla_metadata_out": [*SCHEDULING, *SCHEDULING_OUT],
        "append_kv_": APPEND,
        "mla_decode": [*DECODE, *DECODE_FUNCTIONAL],
        "mla_decode_out": [*DECODE, *DECODE_OUT],
        "merge_states": MERGE,
    }.items()
    for entry in entries
]
