"""Hopper kernels in Gluon for few query rows; this root knows their limits without triton."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from mla_ops.shapes import DecodeShape

__all__ = ["unavailable", "unsupported"]

# Tokens of a tile. Pages below it must tile it, pages above it must be tiled by it.
_TILE_TOKENS = 64
_LATENT = 512
_ROPES = (0, 64)
# The largest batch that one block plans in registers.
_MAX_BATCH = 4096
# TMA coordinates are int32 rows of the pool.
_MAX_ROWS = 2**31
# Tokens of absent pages are taken to lie beyond.
_MAX_TOKENS = 2**30
# TMA strides are multiples of 16 bytes.
_STRIDE_BYTES = 16


@cache
def _reasons(device_type: str, index: int | None) -> tuple[str, ...]:
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed (pip install 'triton>=3.6')",)
    try:
        found = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper")
    except Exception as error:
        # A broken triton raises anything; the reason is reported.
        return (f"triton does not import: {type(error).__name__}: {error}",)
    if found is None:
        return ("this triton has no Gluon for Hopper (install triton>=3.6)",)
    if device_type != "cuda":
        return (f"needs a CUDA device, the tensors are on {device_type}",)
    if not torch.cuda.is_available():
        return ("torch finds no CUDA device (install a CUDA build of torch and a driver)",)
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return (f"needs compute capability 9.0, this device has {capability[0]}.{capability[1]}",)
    return ()


def unavailable(device: torch.device) -> list[str]:
    """Return why this backend cannot run on ``device``, with what mends it."""
    return list(_reasons(device.type, device.index))


def unsupported(shape: DecodeShape) -> list[str]:
    """Return why this backend cannot serve a call of ``shape``."""
    reasons = []
    if shape.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"reads bfloat16 and float16, q is {shape.dtype}")
    rope = shape.head_dim - shape.head_dim_v
    if shape.head_dim_v != _LATENT or rope not in _ROPES:
        reasons.append(
            f"(latent, rope) must be (512, 64) or (512, 0), is {shape.head_dim_v, rope}"
        )
    if shape.page_size not in (16, 32) and shape.page_size % _TILE_TOKENS:
        reasons.append(f"page_size must be 16, 32 or a multiple of 64, is {shape.page_size}")
    if shape.batch_size > _MAX_BATCH:
        reasons.append(f"batch size must be at most {_MAX_BATCH}, is {shape.batch_size}")
    if shape.max_pages * shape.page_size >= _MAX_TOKENS:
        reasons.append(
            f"block_table must cover fewer than 2**30 tokens, has {shape.max_pages} pages"
        )
    if shape.sequence_span >= _MAX_ROWS:
        reasons.append(
            "q, out and lse must hold a sequence within 2**31 elements, one of them spans "
            f"{shape.sequence_span}"
        )
    return reasons + _against_strides(shape)


def _against_strides(shape: DecodeShape) -> list[str]:
    if shape.num_pages == 0:
        return ["kv_cache must have at least one page, has 0"]
    if not shape.aligned_cache:
        return ["kv_cache must begin at a multiple of 16 bytes (slice the pool at whole pages)"]
    row, page = shape.row_stride, shape.page_stride
    if shape.num_pages == 1:
        page = shape.page_size * row
    itemsize = shape.kv_dtype.itemsize
    if row < shape.head_dim or row * itemsize % _STRIDE_BYTES:
        return [f"kv_cache row stride must be a multiple of 16 bytes, is {row} elements"]
    if page % row or page < shape.page_size * row:
        return [
            f"kv_cache page stride must be a multiple of its row stride {row} and hold "
            f"{shape.page_size} rows, is {page}"
        ]
    if shape.num_pages * (page // row) >= _MAX_ROWS:
        return [f"kv_cache must span fewer than 2**31 rows, spans {shape.num_pages * page // row}"]
    return []
