"""What ``bench`` measured: the documented shape of its JSON, its table and its CSV."""

from __future__ import annotations

import csv
import io
from typing import TypedDict

from mla_ops.diagnostics.environment import Environment

__all__ = ["BenchReport", "BenchResult", "as_csv", "as_table", "device_name"]


class BenchResult(TypedDict):
    """One backend in one mode on one shape.

    Attributes:
        batch_size: sequences.
        length: cached tokens of each.
        backend: as in ``backend=``.
        mode: eager, compile, reduce-overhead or hand-graph.
        us: median time of one decode in microseconds; null if it is refused.
        spread: distance of the quartiles of the time in parts of ``us``; null if refused.
        roof_us: the least time that the measured ceilings allow.
        gb_s: bytes of keys over ``us``, in 1e9 a second; null if refused.
        tflop_s: operations over ``us``, in 1e12 a second; null if refused.
        relative_error: RMS against float64 on the same inputs, of the worst pool over all its
            sequences; null if it did not run, and where it is not finite.
        refused: why there is no time; null if there is one.
    """

    batch_size: int
    length: int
    backend: str
    mode: str
    us: float | None
    spread: float | None
    roof_us: float
    gb_s: float | None
    tflop_s: float | None
    relative_error: float | None
    refused: str | None


class BenchReport(TypedDict):
    """All that ``bench --json`` prints.

    Attributes:
        schema: "mla_ops.bench/1"; the number changes when a field changes its meaning.
        date: day of the measurement.
        environment: versions and devices, as ``doctor`` prints them.
        device: where it ran.
        dtype: of queries and cache.
        preset: the published model whose dimensions were used.
        num_heads_q: H.
        head_dim: D, latent + rope.
        head_dim_v: V, the latent.
        page_size: P.
        bandwidth_gb_s: memory bandwidth that this device reached.
        matrix_tflop_s: rate of a matrix product that this device reached.
        results: one for each batch, length, backend and mode.
    """

    schema: str
    date: str
    environment: Environment
    device: str
    dtype: str
    preset: str
    num_heads_q: int
    head_dim: int
    head_dim_v: int
    page_size: int
    bandwidth_gb_s: float
    matrix_tflop_s: float
    results: list[BenchResult]


_HEADER = ("batch", "length", "backend", "mode", "us", "roof us", "of roof", "GB/s", "TFLOP/s")
# A time whose quartiles are further apart is marked.
RESTLESS = 0.2
_MARK = "~"
# Columns that a refusal has too.
_NAMES = 4
# Right-aligned columns: the numbers.
_NUMBERS = {"batch", "length", "us", "roof us", "of roof", "GB/s", "TFLOP/s"}


def as_table(report: BenchReport) -> str:
    """Write the report as an aligned table under a line on shapes and ceilings."""
    title = (
        f"{report['preset']}: {report['num_heads_q']} heads, D {report['head_dim']}, "
        f"V {report['head_dim_v']}, {report['dtype']}, pages of {report['page_size']}, "
        f"on {device_name(report)}"
    )
    roof = (
        f"time of one decode; roof from {report['bandwidth_gb_s']:.1f} GB/s and "
        f"{report['matrix_tflop_s']:.2f} TFLOP/s, measured here"
    )
    rows = [_HEADER, *(_cells(result) for result in report["results"])]
    # A refusal is a sentence in the place of the numbers: no column is as wide.
    timed = [row for row in rows if len(row) == len(_HEADER)]
    widths = [
        max(len(row[column]) for row in (rows if column < _NAMES else timed))
        for column in range(len(_HEADER))
    ]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if name in _NUMBERS else text.ljust(width)
            for text, width, name in zip(row, widths, _HEADER, strict=False)
        ]
        lines.append("  ".join(cells).rstrip())
    if any(_restless(result) for result in report["results"]):
        lines += [
            "",
            f"{_MARK} restless: quartiles more than {RESTLESS:.0%} apart (is this machine idle?)",
        ]
    return "\n".join([title, roof, "", *lines])


def device_name(report: BenchReport) -> str:
    """Name what the times belong to: the GPU, or the CPU with its number of threads."""
    kind, _, index = report["device"].partition(":")
    seen = report["environment"]
    if kind == "cuda":
        return seen["gpus"][int(index or 0)].split(",")[0]
    return f"{kind} (threads: {seen['threads']})"


def _restless(result: BenchResult) -> bool:
    return result["spread"] is not None and result["spread"] > RESTLESS


def _cells(result: BenchResult) -> tuple[str, ...]:
    names = (
        *(str(result["batch_size"]), str(result["length"])),
        *(result["backend"], result["mode"]),
    )
    us, gb_s, tflop_s = result["us"], result["gb_s"], result["tflop_s"]
    if us is None or gb_s is None or tflop_s is None:
        return (*names, f"refused: {result['refused']}")
    roof = result["roof_us"]
    return (
        *(
            *names,
            f"{_MARK if _restless(result) else ''}{us:.1f}",
            f"{roof:.1f}",
            f"{100 * roof / us:.0f}%",
        ),
        *(f"{gb_s:.1f}", f"{tflop_s:.3g}"),
    )


def as_csv(report: BenchReport) -> str:
    """Write the results, a line each under the names of ``BenchResult``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(BenchResult.__annotations__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(report["results"])
    return text.getvalue().rstrip("\n")
