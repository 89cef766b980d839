"""Assertions about compilation: captured whole, compiled once, no copies of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mla_ops.diagnostics.measure import BIG_BYTES, measure
from mla_ops.diagnostics.measurement import Measurement

__all__ = [
    "assert_captured",
    "assert_no_cudagraph_skips",
    "assert_no_pool_clones",
    "assert_no_recompiles",
]


def assert_captured(
    fn: Callable[..., Any], *args: Any, steps: int = 3, **kwargs: Any
) -> Measurement:
    """Check that ``fn`` compiles into one graph that CUDA graphs record and replay.

    On the CPU, which has no CUDA graphs: one graph, no breaks, no recompiles. Look at
    ``captured`` of the result (None there) where a test must not pass for lack of a GPU.

    Args:
        fn: function or module, not compiled yet.
        *args: its arguments.
        steps: calls; 3 are needed to see a replay.
        **kwargs: keyword arguments of ``measure`` and of ``fn``.

    Returns:
        Measurement: all that was seen.

    Raises:
        AssertionError: with the measured facts.
    """
    measured = measure(fn, *args, steps=steps, **kwargs)
    _require("assert_captured", measured, _one_graph(measured) + _cudagraphs(measured, steps))
    return measured


def assert_no_cudagraph_skips(
    fn: Callable[..., Any], *args: Any, steps: int = 3, **kwargs: Any
) -> Measurement:
    """Check that CUDA graphs are used wherever they were asked for, several graphs allowed.

    A graph that was neither skipped aloud nor recorded fails too, unless its calls only warmed it
    up, as those of a graph that a recompilation replaced after one step. Without CUDA there is
    nothing to skip and the check passes: it needs a GPU to mean something.

    Raises:
        AssertionError: with the measured facts.
    """
    measured = measure(fn, *args, steps=steps, **kwargs)
    _require("assert_no_cudagraph_skips", measured, _compiled(measured) + _cudagraphs(measured, 0))
    return measured


def assert_no_recompiles(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    *,
    allowed: int = 0,
    mode: str | None = None,
    **kwargs: Any,
) -> Measurement:
    """Check that ``fn`` compiled for the first arguments serves all the others.

    Args:
        fn: function or module, not compiled yet.
        args_list: positional arguments of each call.
        allowed: recompiles that may happen: 1 for the step from a static to a dynamic size, and
            one for each of the sizes 0 and 1, of which torch.compile makes graphs of their own.
        mode: of ``torch.compile``.
        **kwargs: keyword arguments of ``measure`` and of ``fn``.

    Raises:
        AssertionError: with the guards that failed.
        ValueError: fewer than two calls, which can prove nothing.
    """
    if len(args_list) < 2:
        raise ValueError(
            f"assert_no_recompiles: args_list must hold at least 2 calls, got {len(args_list)}"
        )
    measured = measure(
        fn, steps=len(args_list), inputs=lambda step: args_list[step], mode=mode, **kwargs
    )
    problems = _compiled(measured)
    if measured.recompiles is None:
        problems.append("recompiles are unknown on this torch")
    elif len(measured.recompiles) > allowed:
        problems.append(f"{len(measured.recompiles)} recompiles, {allowed} allowed")
    _require("assert_no_recompiles", measured, problems)
    return measured


def assert_no_pool_clones(
    fn: Callable[..., Any],
    *args: Any,
    pool_bytes: int = BIG_BYTES,
    steps: int = 1,
    **kwargs: Any,
) -> Measurement:
    """Check that the compiled ``fn`` copies no buffer of ``pool_bytes`` or more.

    Args:
        fn: function or module, not compiled yet.
        *args: its arguments.
        pool_bytes: bytes of the smallest pool; smaller buffers may be copied.
        steps: calls.
        **kwargs: keyword arguments of ``measure`` and of ``fn``.

    Raises:
        AssertionError: with size and kernel of every copy.
    """
    measured = measure(fn, *args, steps=steps, big_bytes=pool_bytes, **kwargs)
    problems = _compiled(measured)
    if measured.clones is None:
        problems.append("copies are unknown: no generated code was seen")
    elif measured.clones:
        problems.append(f"{len(measured.clones)} copies of at least {pool_bytes} bytes a step")
    _require("assert_no_pool_clones", measured, problems)
    return measured


def _compiled(measured: Measurement) -> list[str]:
    return [] if measured.graphs else ["nothing was compiled"]


def _one_graph(measured: Measurement) -> list[str]:
    problems = []
    if measured.graphs != 1:
        problems.append(f"{measured.graphs} graphs, expected 1")
    if measured.breaks is None or measured.breaks:
        problems.append(f"graph breaks: {_count(measured.breaks)}")
    if measured.recompiles is None or measured.recompiles:
        problems.append(f"recompiles: {_count(measured.recompiles)}")
    return problems


def _cudagraphs(measured: Measurement, steps: int) -> list[str]:
    """List what is wrong with recordings; nothing where no graph on CUDA asked for them."""
    if not measured.capturable:
        return []
    problems = []
    if measured.skips is None or measured.skips:
        problems.append(f"CUDA graph skips: {measured.skips}")
    if not measured.recordings:
        problems.append(
            f"CUDA graph recordings: {measured.recordings} (dropped without a word, or fewer than "
            "2 steps)"
        )
    elif unrecorded := _unrecorded(measured):
        problems.append(
            f"CUDA graph recordings: {measured.recordings}, none of {unrecorded} of the "
            f"{measured.capturable} graphs (dropped without a word)"
        )
    if steps > 2 and measured.replays == 0:
        problems.append("the recording was never replayed")
    return problems


def _unrecorded(measured: Measurement) -> int:
    """Count the graphs that were called beyond their warm-up and have no recording."""
    if measured.warmed_up is None or measured.recordings is None:
        return 0
    due = measured.capturable - measured.warmed_up
    # The difference tells less, several recordings being of one graph, but always something.
    return max(measured.unrecorded or 0, due - measured.recordings)


def _count(items: Sequence[Any] | None) -> str:
    return "unknown" if items is None else str(len(items))


def _require(name: str, measured: Measurement, problems: list[str]) -> None:
    if problems:
        raise AssertionError(f"{name}: {'; '.join(problems)}\n{measured.describe()}")
