"""Which dense decode a flash_mla that is importable offers: by capability, never by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Api", "Found", "find_flash_mla"]

_INSTALL = "pip install --no-deps sgl-flash-mla"
_REINSTALL = "pip install --force-reinstall --no-deps sgl-flash-mla"
_NAMESPACES = ("flash_mla_legacy", "_flashmla_C", "flash_mla")
# q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, metadata, splits.
_DENSE_TYPES = (
    *("Tensor", "Tensor", "int", "Tensor", "Tensor", "float", "bool"),
    *("Optional[Tensor]", "Optional[Tensor]"),
)


class Api(NamedTuple):
    """A dense decode: called like ``dense_decode_fwd``, returns out, lse and more."""

    name: str
    decode: Callable[..., Any]
    # Trailing arguments of newer signatures, all None.
    extra: tuple[None, ...] = ()
    # (cache_seqlens, S * H) -> its own schedule; None where it reads ours.
    plan: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None


class Found(NamedTuple):
    """The dense decode to call, or why there is none."""

    api: Api | None
    reasons: tuple[str, ...]


@cache
def find_flash_mla() -> Found:
    """Find a dense decode once per process; what went wrong on the way is kept, not raised."""
    reasons: list[str] = []
    module = _import("flash_mla", reasons)
    for namespace in _NAMESPACES:
        if namespace == "_flashmla_C" and not hasattr(torch.ops._flashmla_C, "dense_decode_fwd"):
            _import("vllm._flashmla_C", reasons)
        api = _operator(namespace, reasons)
        if api is not None:
            return Found(api, ())
    api = None if module is None else _pybind(module) or _two_tensors(module)
    if api is not None:
        return Found(api, ())
    if module is not None:
        version = getattr(module, "__version__", "of unknown version")
        reasons.append(f"flash_mla {version} has no dense decode for Hopper ({_INSTALL})")
    return Found(None, tuple(reasons) or (f"flash_mla is not installed ({_INSTALL})",))


def _import(name: str, reasons: list[str]) -> Any:
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return None
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that lacks this extension is absent; one that lacks a dependency is broken.
        if error.name == name and "." in name:
            return None
        reason = f"{type(error).__name__}: {error}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    reasons.append(f"{name} is installed but does not import: {reason} ({_REINSTALL})")
    return None


def _operator(namespace: str, reasons: list[str]) -> Api | None:
    packet = getattr(getattr(torch.ops, namespace), "dense_decode_fwd", None)
    if packet is None:
        return None
    operator = packet.default
    types = tuple(str(argument.type) for argument in operator._schema.arguments)
    extra = types[len(_DENSE_TYPES) :]
    if types[: len(_DENSE_TYPES)] != _DENSE_TYPES or set(extra) - {"Optional[Tensor]"}:
        reasons.append(f"{namespace}::dense_decode_fwd has another signature ({_INSTALL})")
        return None
    return Api(f"torch.ops.{namespace}.dense_decode_fwd", operator, (None,) * len(extra))


def _pybind(module: Any) -> Api | None:
    decode = getattr(getattr(module, "cuda", None), "dense_decode_fwd", None)
    return None if decode is None else Api("flash_mla.cuda.dense_decode_fwd", decode)


def _two_tensors(module: Any) -> Api | None:
    plan = getattr(module, "get_mla_metadata", None)
    decode = getattr(module, "flash_mla_with_kvcache", None)
    if plan is None or decode is None:
        return None
    # The 2026 API takes anything here and returns an object that the first decode fills.
    if "cache_seqlens" not in inspect.signature(plan).parameters:
        return None

    def mapped(
        q: Tensor,
        kv_cache: Tensor,
        head_dim_v: int,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        tile_scheduler_metadata: Tensor,
        num_splits: Tensor,
    ) -> Any:
        return decode(
            *(q, kv_cache, block_table, cache_seqlens, head_dim_v),
            *(tile_scheduler_metadata, num_splits),
            softmax_scale=softmax_scale,
            causal=causal,
        )

    def planned(cache_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        tile_scheduler_metadata, num_splits = plan(cache_seqlens, rows, 1)
        return tile_scheduler_metadata, num_splits

    return Api("flash_mla.flash_mla_with_kvcache", mapped, plan=planned)
