"""KVFormat: how a token's latent and rope lie in the paged cache."""

from __future__ import annotations

from enum import Enum

import torch

__all__ = ["KVFormat"]


class KVFormat(Enum):
    """The layout of one token in ``kv_cache``; inferred from its dtype and last size.

    ``DENSE``: ``[N, P, 1, D]`` rows of float64, float32, bfloat16 or float16, latent first.
    ``FP8``: ``[N, P, 1, D]`` float8_e4m3fn with one scale per tensor.
    ``FP8_DS``: ``[N, P, 1, 656]`` uint8, DeepSeek V3.2 (512 fp8 + 4 float32 scales + 64 bf16).
    ``FP8_DS4``: ``[N, bytes per page]`` uint8, DeepSeek V4 (page-separated values and scales).

    Source: FlashMLA's README and kernels for the three FP8 layouts.
    """

    DENSE = "dense"
    FP8 = "fp8"
    FP8_DS = "fp8_ds"
    FP8_DS4 = "fp8_ds4"

    @classmethod
    def infer(cls, kv_cache: torch.Tensor) -> KVFormat | None:
        """Return the format of ``kv_cache``, or None when no format has its dtype and width."""
        if kv_cache.dtype in DENSE_DTYPES:
            return cls.DENSE
        if kv_cache.dtype == torch.float8_e4m3fn:
            return cls.FP8
        if kv_cache.dtype == torch.uint8:
            return cls.FP8_DS if kv_cache.dim() == 4 else cls.FP8_DS4
        return None


DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
