"""What one decode call comes down to, worked out once for all calls of the same layout.

The checks and the choice of a backend take 20 us of Python. They depend on shapes, strides,
dtypes, devices and names only, so their outcome is remembered under those (a pure function of
its key: no call influences another). A layout met three times in a row is known by one check in
C++. What depends on addresses, whether outputs overlap inputs, is compared on every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mla_ops._torch import layout_guard
from mla_ops.ops._decode_check import check_decode, check_outputs
from mla_ops.ops._selection import kernel, select
from mla_ops.shapes import DecodeShape, packed_extent

__all__ = ["DecodePlan", "forget_plans", "plan_decode", "plan_decode_out"]

# A server meets a few hundred layouts (batch sizes times table widths); beyond this, start anew.
_MOST_PLANS = 4096


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A checked layout: what runs, and how many bytes of memory each tensor spans."""

    backend: str
    shape: DecodeShape
    launch: Callable[..., Any]
    # Whether launch returns out and lse (flash_mla allocates them) or writes the caller's.
    returns: bool
    # False where no kernel has anything to do: no rows, or no pages to read.
    reads_keys: bool
    # Bytes from first to last element of the first six inputs, 0 where absent or empty; then of
    # out and lse where they are the caller's.
    spans: tuple[int, ...]


# Slots, here and above: an eager call reads six attributes, and those of a NamedTuple are slower.
@dataclass(frozen=True, slots=True)
class RecentPlan:
    """The plan of the last calls, without sink and scales, of an aligned q and cache.

    ``fits`` takes the first six arguments of a call; it answers False until a layout was met
    often enough to pay for a guard.
    """

    fits: Callable[..., bool]
    head_dim_v: int
    backend: str
    plan: DecodePlan


def _never(*args: Any) -> bool:
    return False


_plans: dict[Any, DecodePlan] = {}
_NO_PLAN: Any = None
recent = RecentPlan(_never, 0, "", _NO_PLAN)


def forget_plans() -> None:
    """Forget every plan, as after a change of what is installed or chosen (tests do that)."""
    global recent
    _plans.clear()
    recent = RecentPlan(_never, 0, "", _NO_PLAN)


def plan_decode(args: Any) -> DecodePlan:
    """Return the plan of ``mla_decode``'s arguments; raise what its check raises.

    Callers look at ``recent`` first: to ask it here would cost another call.
    """
    key = _layout(*args)
    plan = _plans.get(key)
    if plan is None:
        return _remember(key, check_layout(args, traced=False), args, ())
    _note(plan, args)
    return plan


def _note(plan: DecodePlan, args: Any) -> None:
    """Remember a plan as recent; pay for its guard the second time in a row only."""
    global recent
    fits = None
    if recent.plan is plan and recent.fits is _never:
        special = any(argument is not None for argument in args[9:12])
        if not special and not (args[0].data_ptr() | args[1].data_ptr()) % 16:
            fits = layout_guard(args[:6]) or _guard_without_schedule(args)
    recent = RecentPlan(fits or _never, args[7], args[12], plan)


def _guard_without_schedule(args: Any) -> Callable[..., bool] | None:
    check = layout_guard(args[:4])
    if check is None or args[4] is not None or args[5] is not None:
        return None

    def fits(q: Any, kv: Any, table: Any, lengths: Any, rows: Any, splits: Any) -> bool:
        return rows is None and splits is None and check(q, kv, table, lengths)

    return fits


def plan_decode_out(args: Any) -> DecodePlan:
    """Return the plan of ``mla_decode_out``'s arguments; raise what its checks raise."""
    key = _layout(*args)
    plan = _plans.get(key)
    if plan is None:
        return _remember(key, check_layout(args, traced=False), args, args[13:])
    if _may_overlap(plan.spans, *args):
        check_outputs(*args, traced=False)
    return plan


def check_layout(args: Any, *, traced: bool) -> tuple[str, DecodeShape]:
    """Refuse what does not fit and return the backend with the facts it was chosen from.

    Args:
        args: those of ``mla_decode``, or of ``mla_decode_out``.
        traced: whether the tensors have no memory.
    """
    check_decode(*args[:12])
    if args[13:]:
        check_outputs(*args, traced=traced)
    q, kv_cache, block_table = args[:3]
    pages, page_size, _, head_dim = kv_cache.shape
    shape = DecodeShape(
        *(q.device, q.dtype, kv_cache.dtype, q.shape[0], q.shape[1], q.shape[2], head_dim),
        *(args[7], pages, page_size, block_table.shape[1], kv_cache.stride(0), kv_cache.stride(1)),
        aligned_cache=traced or kv_cache.data_ptr() % 16 == 0,
        out_dtype=args[13].dtype if args[13:] else None,
        sequence_span=max(_sequence_span(tensor) for tensor in (q, *args[13:])),
    )
    return select("mla_decode", args[12], shape, traced=traced), shape


def _sequence_span(tensor: Tensor) -> int:
    return sum((tensor.shape[dim] - 1) * tensor.stride(dim) for dim in range(1, tensor.dim()))


def _layout(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    splits: Tensor | None,
    softmax_scale: float,
    head_dim_v: int,
    causal: bool,
    sink: Tensor | None,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    backend: str,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Any:
    """Return everything the checks and the choice of a backend look at, as a dictionary key.

    The device of q stands whole, the others' by index (-1 on CPU), which is cheaper: no build of
    torch has two kinds of accelerators.
    """
    return (
        (q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % 16 == 0),
        (kv.shape, kv.stride(), kv.dtype, kv.get_device(), kv.data_ptr() % 16 == 0),
        (table.shape, table.stride(), table.dtype, table.get_device()),
        (lengths.shape, lengths.is_contiguous(), lengths.dtype, lengths.get_device()),
        rows is None or (rows.shape, rows.is_contiguous(), rows.dtype, rows.get_device()),
        splits is None
        or (splits.shape, splits.is_contiguous(), splits.dtype, splits.get_device()),
        sink is None or (sink.shape, sink.is_contiguous(), sink.dtype, sink.get_device()),
        (head_dim_v, descale_q is None, descale_k is None, backend),
        out is None or (out.shape, out.stride(), out.dtype, out.get_device()),
        lse is None or (lse.shape, lse.stride(), lse.dtype, lse.get_device()),
    )


def _remember(
    key: Any, chosen: tuple[str, DecodeShape], args: Any, outputs: tuple[Tensor, ...]
) -> DecodePlan:
    backend, shape = chosen
    reads_keys = 0 not in (shape.batch_size, shape.seqlen_q, shape.max_pages, shape.num_pages)
    returns = backend == "flash_mla" and reads_keys and not outputs
    if returns:
        launch = kernel(backend, "prepare_decode")(*args[:3], args[4], args[9])
    else:
        launch = kernel(backend, "mla_decode_out")
    plan = DecodePlan(
        *(backend, shape, launch, returns, reads_keys),
        spans=tuple(_span(tensor) for tensor in (*args[:6], *outputs)),
    )
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _span(tensor: Tensor | None) -> int:
    if tensor is None or tensor.numel() == 0:
        return 0
    return packed_extent(tensor) * tensor.element_size()


def _may_overlap(
    spans: tuple[int, ...],
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    rows: Tensor | None,
    splits: Tensor | None,
    *rest: Any,
) -> bool:
    """Compare byte ranges; written out, because a loop takes twice the time of the comparisons.

    An empty tensor may be reported too, and so is a call with a sink: the exact check decides.
    """
    out: int = rest[7].data_ptr()
    lse: int = rest[8].data_ptr()
    q_span, kv_span, table_span, lengths_span, rows_span, splits_span, out_span, lse_span = spans
    out_end, lse_end = out + out_span, lse + lse_span
    if (out < lse_end and lse < out_end) or rest[3] is not None:
        return True
    at = q.data_ptr()
    if (at < out_end and out < at + q_span) or (at < lse_end and lse < at + q_span):
        return True
    at = kv_cache.data_ptr()
    if (at < out_end and out < at + kv_span) or (at < lse_end and lse < at + kv_span):
        return True
    at = block_table.data_ptr()
    if (at < out_end and out < at + table_span) or (at < lse_end and lse < at + table_span):
        return True
    at = cache_seqlens.data_ptr()
    if (at < out_end and out < at + lengths_span) or (at < lse_end and lse < at + lengths_span):
        return True
    if rows is None or splits is None:
        return False
    at = rows.data_ptr()
    if (at < out_end and out < at + rows_span) or (at < lse_end and lse < at + rows_span):
        return True
    at = splits.data_ptr()
    return (at < out_end and out < at + splits_span) or (at < lse_end and lse < at + splits_span)
