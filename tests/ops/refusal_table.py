"""Every way to call an operator wrongly, once: what is changed in a good call, and the refusal."""

import torch
from refusals import (
    BF16,
    F16,
    F32,
    F64,
    I32,
    I64,
    Refusal,
    devices,
    elsewhere,
    expanded,
    gappy,
    gappy_first,
    given,
    own,
    retyped,
    shaped,
    tensor,
    typed,
)

PAIRS = "((512, 64), (512, 0), (256, 64), (256, 32), (128, 32))"
NAME = "backend must be 'auto' or one of ('flash_mla', 'gluon', 'triton', 'cpu', 'reference')"
LENGTHS = "cache_seqlens must be contiguous [B]"
FLOATS = "float64, float32, bfloat16 or float16"

M = "mla_metadata: "
SCHEDULING = [
    *retyped("mla_metadata", "int32", "cache_seqlens", "topk_length"),
    ("rank", shaped("cache_seqlens", 3, 1), ValueError, M + LENGTHS),
    ("strided", gappy("cache_seqlens"), ValueError, M + LENGTHS),
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
    ("backend", given(backend="cuda"), ValueError, M + NAME),
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
    ("slot_mapping-dtype", typed("slot_mapping", I32), TypeError,
     A + "slot_mapping must be int64"),
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
QUERIES = "q must be [B, S, H, D] with last stride 1"
DECODE = [
    ("descale_q", tensor("descale_q"), ValueError, D + "descale_q must be None"),
    ("descale_k", tensor("descale_k"), ValueError, D + "descale_k must be None"),
    ("q-dtype", typed("q", I32), TypeError, D + f"q must be {FLOATS}"),
    ("kv_cache-dtype", typed("kv_cache", torch.bfloat16), TypeError,
     D + "kv_cache must be torch.float32 like q"),
    ("q-rank", shaped("q", 3, 4, 160), ValueError, D + QUERIES),
    ("q-strided", gappy("q"), ValueError, D + QUERIES),
    ("kv_cache-rank", shaped("kv_cache", 5, 4, 160), ValueError, D + POOL),
    ("kv_cache-heads", shaped("kv_cache", 5, 4, 2, 160), ValueError, D + POOL),
    ("kv_cache-strided", gappy("kv_cache"), ValueError, D + POOL),
    ("kv_cache-page_size", shaped("kv_cache", 5, 0, 1, 160), ValueError,
     D + "kv_cache must be of page_size >= 1"),
    ("q-width", shaped("q", 3, 2, 4, 128), ValueError,
     D + "q must be of head_dim 160 like kv_cache"),
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
    ("backend", given(backend="cuda"), ValueError, D + NAME),
]  # fmt: skip
DECODE_FUNCTIONAL = [
    ("only-out", lambda a: {"out": a["q"]}, ValueError,
     D + "out and lse must be given both or neither"),
    ("only-lse", lambda a: {"lse": a["q"]}, ValueError,
     D + "out and lse must be given both or neither"),
]  # fmt: skip
DECODE_OUT = [
    ("out-dtype", typed("out", torch.bfloat16), TypeError, D + "out must be torch.float32"),
    *((f"out-{out}-of-{q}", lambda a, q=q, out=out: {
        name: a[name].to(dtype) for name, dtype in (("q", q), ("kv_cache", q), ("out", out))},
       TypeError, D + f"out must be {q}{wide}")
      for q, out, wide in (
          (BF16, F16, f" or {F32}"), (F16, BF16, f" or {F32}"), (BF16, F64, f" or {F32}"),
          (BF16, I32, f" or {F32}"), (F64, F32, ""))),
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
