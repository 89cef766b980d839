"""Which backend runs a call: resolved at launch, from facts that never depend on values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from mla_ops.errors import BackendUnavailableError
from mla_ops.shapes import DecodeShape

__all__ = ["BackendReport", "backend_report", "check_backend_name", "device_kernel", "select"]

BACKENDS = ("flash_mla", "gluon", "triton", "cpu", "reference")
# Where each operator's kernel lives inside a backend.
_MODULES = {
    "flash_mla": "mla_ops.backends.flash_mla",
    "gluon": "mla_ops.backends.gluon.decode",
    "cpu": "mla_ops.backends.cpu",
    "reference": "mla_ops.backends.reference",
}
_TRITON_MODULES = {
    "mla_metadata_out": "mla_ops.backends.triton.metadata",
    "append_kv_": "mla_ops.backends.triton.append",
    "merge_states": "mla_ops.backends.triton.merge",
    "mla_decode_out": "mla_ops.backends.triton.decode",
}


@cache
def kernel(backend: str, op: str) -> Callable[..., Any]:
    """Import the function ``op`` of a backend at its first use."""
    module = _TRITON_MODULES[op] if backend == "triton" else _MODULES[backend]
    function: Callable[..., Any] = getattr(import_module(module), op)
    return function


@cache
def _support(backend: str) -> Any:
    # The root of a backend knows its limits without importing triton or a kernel package.
    return import_module(f"mla_ops.backends.{backend}")


def check_backend_name(op: str, backend: str) -> None:
    """Refuse a backend name that does not exist."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"{op}: backend must be 'auto' or one of {BACKENDS}, got {backend!r} "
            "(see mla_ops.backend_report())"
        )


def device_kernel(op: str, device: torch.device, backend: str | None = None) -> Callable[..., Any]:
    """Return the kernel of an operator that has one implementation a device."""
    if backend is None:
        if device.type == "cpu":
            backend = "cpu"
        elif device.type == "cuda" and not _support("triton").unavailable(device):
            backend = "triton"
        else:
            backend = "reference"
    return kernel(backend, op)


def reasons_against(backend: str, shape: DecodeShape, *, probe: bool = True) -> list[str]:
    """List why ``backend`` cannot run a decode of ``shape``; empty means it can.

    Args:
        backend: one of ``BACKENDS``.
        shape: the call.
        probe: look at this machine too; False while tracing for a device that is not here.
    """
    support = _support(backend)
    reasons: list[str] = []
    if probe:
        reasons += support.unavailable(shape.device)
    return reasons + list(support.unsupported(shape))


def select(op: str, backend: str, shape: DecodeShape, *, traced: bool = False) -> str:
    """Resolve ``backend`` for a decode call; a named backend that cannot run raises.

    Raises:
        ValueError: no backend has that name.
        BackendUnavailableError: the named backend cannot run, with every reason.
    """
    check_backend_name(op, backend)
    if backend == "auto":
        return "auto" if traced else _best(shape)
    absent = traced and shape.device.type == "cuda" and not torch.cuda.is_available()
    # Whether a GPU backend will run there cannot be asked here; that the CPU backend will not can.
    reasons = reasons_against(backend, shape, probe=not absent or backend == "cpu")
    if reasons:
        raise BackendUnavailableError(
            f"{op}: backend must be able to run this call, got {backend!r}: "
            f"{'; '.join(reasons)} (use backend='auto')"
        )
    return backend


def _best(shape: DecodeShape) -> str:
    for name in _preferences(shape):
        if not reasons_against(name, shape):
            return name
    return "reference"


# Where our kernels beat FlashMLA on an H200. The first line decides whose query rows of a
# sequence (S * H) and batch, the first two numbers, are no smaller than the call's: there, tables
# from the third number of tokens wide up to the fourth (0: none). Source: scripts/bench_decode.py
# --sweep, its result in scripts/results/.
_ANY = 2**31
_GLUON_WINS = (
    (16, 64, 0, _ANY),
    (16, 128, 2**11, _ANY),
    (32, 64, 0, _ANY),
    (32, 128, 2**13, _ANY),
    (64, 4, 0, _ANY),
    (64, 8, 0, 2**15),
    (64, 32, 0, 2**13),
    (64, 64, 0, 2**10),
    (128, 1, 0, 2**16),
    (128, 2, 0, 2**15),
    (128, 8, 0, 2**13),
    (128, 16, 0, 2**11),
    (128, 32, 0, 2**9),
)
_TRITON_WINS = (
    (16, 1, 0, 2**18),
    (16, 2, 0, 2**17),
    (16, 4, 0, 2**16),
    (16, 8, 0, 2**14),
    (16, 16, 0, 2**12),
    (16, 64, 0, 2**9),
    (32, 1, 0, 2**17),
    (32, 2, 0, 2**15),
    (32, 4, 0, 2**13),
    (32, 8, 2**10, 2**11),
    (64, 1, 2**10, 2**11),
    (64, 2, 2**10, 2**13),
    (64, 4, 2**10, 2**11),
    (128, 1, 0, 2**14),
    (128, 2, 2**10, 2**12),
)


def _wins(table: tuple[tuple[int, int, int, int], ...], shape: DecodeShape) -> bool:
    rows, width = shape.seqlen_q * shape.num_heads_q, shape.max_pages * shape.page_size
    for most_rows, batch, least_width, width_up_to in table:
        if rows <= most_rows and shape.batch_size <= batch:
            return least_width <= width <= width_up_to
    return False


def _preferences(shape: DecodeShape) -> tuple[str, ...]:
    if shape.device.type == "cpu":
        return ("cpu",)
    if shape.device.type != "cuda":
        return ()
    portable = _wins(_TRITON_WINS, shape)
    if _wins(_GLUON_WINS, shape):
        return ("gluon", "triton", "flash_mla") if portable else ("gluon", "flash_mla", "triton")
    if portable:
        return ("triton", "flash_mla", "gluon")
    return ("flash_mla", "gluon", "triton")


def _why(shape: DecodeShape) -> str:
    if shape.device.type != "cuda":
        return f"all that serves {shape.device.type} beside the reference"
    rows, width = shape.seqlen_q * shape.num_heads_q, shape.max_pages * shape.page_size
    return (
        f"fastest first on an H200 with S * H = {rows} query rows, batch {shape.batch_size} and "
        f"a block table {width} tokens wide"
    )


@dataclass(frozen=True)
class BackendReport:
    """Every backend with the reasons why it cannot run, and the choice of "auto" with its own.

    Attributes:
        shape: the call asked about.
        reasons: why each backend cannot run; empty where it can.
        choice: the backend "auto" takes: the first of ``order`` that runs, else the reference.
        order: what "auto" tries, fastest first.
        why: where that order comes from.
    """

    shape: DecodeShape
    reasons: dict[str, tuple[str, ...]]
    choice: str
    order: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        order = ", ".join(self.order) or "none"
        lines = [f"auto -> {self.choice}", f"{'order':10} {order}: {self.why}"]
        for name, reasons in self.reasons.items():
            lines.append(f"{name:10} " + ("; ".join(reasons) if reasons else "runs"))
        return "\n".join(lines)


def backend_report(
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    batch_size: int = 1,
    seqlen_q: int = 1,
    num_heads_q: int = 16,
    head_dim: int = 576,
    head_dim_v: int = 512,
    page_size: int = 64,
    max_seq_len: int = 4096,
    out_dtype: torch.dtype | None = None,
) -> BackendReport:
    """Report for each backend whether it runs such a decode call here, and if not, every reason.

    Args:
        device: where the tensors would lie; None means CUDA if there is one, else CPU.
        dtype: dtype of q and of the dense cache.
        batch_size: B.
        seqlen_q: S.
        num_heads_q: H on this rank.
        head_dim: D, latent + rope.
        head_dim_v: V, the latent.
        page_size: P.
        max_seq_len: tokens the block table has room for.
        out_dtype: dtype of the caller's ``out``; None means that of q.

    Returns:
        BackendReport: print it, or read ``reasons`` and ``choice``.

    Raises:
        ValueError: ``page_size`` or ``max_seq_len`` is not positive.
    """
    for name, size in (("page_size", page_size), ("max_seq_len", max_seq_len)):
        if size < 1:
            raise ValueError(f"backend_report: {name} must be positive, got {size} (mend it)")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    max_pages = -(-max_seq_len // page_size)
    shape = DecodeShape(
        *(torch.device(device), dtype, dtype, batch_size, seqlen_q, num_heads_q),
        *(head_dim, head_dim_v, batch_size * max_pages, page_size, max_pages),
        *(page_size * head_dim, head_dim),
        out_dtype=out_dtype,
    )
    reasons = {name: tuple(reasons_against(name, shape)) for name in BACKENDS}
    return BackendReport(shape, reasons, _best(shape), _preferences(shape), _why(shape))
