"""warmup: compile the kernels of a model before a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mla_ops._torch import inside_graph
from mla_ops.ops.append import append_kv_
from mla_ops.ops.decode import mla_decode
from mla_ops.ops.metadata import mla_metadata
from mla_ops.shapes import ceil_div

__all__ = ["warmup"]


def warmup(
    *,
    num_heads_q: int,
    batch_sizes: Iterable[int],
    max_seq_len: int,
    seqlen_q: int = 1,
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    causal: bool = True,
    attn_sink: bool = False,
    backend: str = "auto",
    device: torch.device | str | None = None,
) -> None:
    """Compile what a model's decode steps will need, by running each on one page.

    A kernel's first launch compiles it, which takes seconds; under capture that delays the
    recording, and the first token of a server. Call it once before the first capture. Kernels
    are compiled for contiguous tensors: other strides may compile again.

    Args:
        num_heads_q: H on this rank.
        batch_sizes: every B that will be captured, padding included.
        max_seq_len: tokens the block tables have room for; "auto" chooses by it, and so do
            backends among their variants: tables of another width may compile again.
        seqlen_q: S.
        latent_dim: V.
        rope_dim: D - V.
        page_size: P.
        dtype: dtype of q and of the cache.
        out_dtype: dtype of the ``out`` that the model passes, as patched transformers models of 16
            bits pass float32; None: it passes none.
        causal: as the model will call ``mla_decode``.
        attn_sink: whether the model gives sinks.
        backend: as the model will name it.
        device: where the model lies; None means CUDA if there is one, else CPU.

    Raises:
        ValueError: a size is not positive, or an argument does not fit ``mla_decode``.
        BackendUnavailableError: the named backend cannot run such a call; lists every reason.
        RuntimeError: called inside a compiled region or a capture.
    """
    where = inside_graph()
    if where is not None:
        raise RuntimeError(
            f"warmup: must run outside of graphs, got called in {where} (call it before)"
        )
    batches = tuple(batch_sizes)
    if not batches:
        raise ValueError("warmup: batch_sizes must not be empty, got () (name every captured B)")
    # A size of 0 would run, and compile nothing.
    for name, size in (
        *(("page_size", page_size), ("max_seq_len", max_seq_len), ("seqlen_q", seqlen_q)),
        *(("num_heads_q", num_heads_q), ("batch_sizes", min(batches))),
    ):
        if size < 1:
            raise ValueError(f"warmup: {name} must be positive, got {size} (mend or leave it out)")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    head_dim, pages = latent_dim + rope_dim, ceil_div(max_seq_len, page_size)
    with torch.inference_mode():
        kv_cache = torch.zeros((1, page_size, 1, head_dim), dtype=dtype, device=device)
        sink = torch.zeros((num_heads_q,), device=device) if attn_sink else None
        for batch in batches:
            slots = torch.full((batch * seqlen_q,), -1, dtype=torch.int64, device=device)
            tokens = kv_cache.new_zeros((batch * seqlen_q, head_dim))
            append_kv_(kv_cache, tokens[:, :latent_dim], tokens[:, latent_dim:], slots)
            options = {"causal": causal, "attn_sink": sink, "backend": backend}
            rows = (batch, seqlen_q, num_heads_q)
            _decode(kv_cache, rows, pages, latent_dim, out_dtype, **options)


def _decode(
    kv_cache: Tensor,
    rows: tuple[int, int, int],
    pages: int,
    latent_dim: int,
    out_dtype: torch.dtype | None,
    **options: Any,
) -> None:
    batch, seqlen_q, heads = rows
    lengths = torch.ones((batch,), dtype=torch.int32, device=kv_cache.device)
    out, lse = None, None
    if out_dtype is not None:
        out = kv_cache.new_empty((*rows, latent_dim), dtype=out_dtype)
        lse = kv_cache.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    mla_decode(
        kv_cache.new_zeros((*rows, kv_cache.shape[-1])),
        kv_cache,
        lengths.new_zeros((batch, pages)),
        lengths,
        mla_metadata(lengths, num_heads_q=heads, seqlen_q=seqlen_q, backend=options["backend"]),
        softmax_scale=1.0,
        head_dim_v=latent_dim,
        out=out,
        lse=lse,
        **options,
    )
