"""The picture of a benchmark: time over length, a line per backend and mode, and the roof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mla_ops.cli.bench_report import BenchReport, BenchResult, device_name

__all__ = ["check_plot_path", "plot"]

_STYLES = {
    "eager": ("-", "o"),
    "compile": ("--", "s"),
    "reduce-overhead": ("-.", "^"),
    "hand-graph": (":", "D"),
}
_COLUMNS = 3
# Inches of one panel and of the legend beside them.
_PANEL = (4.6, 4.0)
_LEGEND = 1.8


def check_plot_path(path: Path) -> None:
    """Check before anything is measured that a picture can be written there.

    Raises:
        ValueError: matplotlib, the folder or the format is missing, with what mends it.
    """
    try:
        formats = _figure().canvas.get_supported_filetypes()
    except ImportError as error:
        raise ValueError(
            f"bench: matplotlib must be importable for --plot, got {error} "
            "(pip install matplotlib)"
        ) from None
    if not path.parent.is_dir():
        raise ValueError(
            f"bench: plot must be in a folder that exists, got {path} (mkdir -p {path.parent})"
        )
    if path.suffix.removeprefix(".") not in formats:
        raise ValueError(
            f"bench: plot must end in one of {', '.join(sorted(formats))}, got {path.name} "
            "(use --plot out.png)"
        )


def plot(report: BenchReport, path: Path) -> None:
    """Draw a panel for each batch size and write the file."""
    results = report["results"]
    batches = sorted({result["batch_size"] for result in results})
    columns = min(len(batches), _COLUMNS)
    rows = -(-len(batches) // columns)
    figure = _figure(
        figsize=(_PANEL[0] * columns + _LEGEND, _PANEL[1] * rows), layout="constrained"
    )
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    lines = list(dict.fromkeys((result["backend"], result["mode"]) for result in results))
    for panel, batch in zip(panels, batches, strict=False):
        _draw(panel, [each for each in results if each["batch_size"] == batch], lines)
        panel.set_title(f"batch {batch}")
    for panel in panels[len(batches) :]:
        panel.set_axis_off()
    for panel in panels[::columns]:
        panel.set_ylabel("time of one decode, us")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.suptitle(
        f"{report['preset']}: {report['num_heads_q']} heads, {report['dtype']}, "
        f"{device_name(report)}"
    )
    figure.savefig(path, dpi=130)


def _draw(panel: Any, results: list[BenchResult], lines: list[tuple[str, str]]) -> None:
    backends = list(dict.fromkeys(backend for backend, _ in lines))
    for backend, mode in lines:
        points = sorted(
            (each["length"], each["us"])
            for each in results
            if (each["backend"], each["mode"]) == (backend, mode) and each["us"] is not None
        )
        style, marker = _STYLES[mode]
        panel.plot(
            [length for length, _ in points],
            [us for _, us in points],
            linestyle=style,
            marker=marker,
            markersize=4,
            color=f"C{backends.index(backend)}",
            label=f"{backend}, {mode}",
        )
    roof = sorted({(each["length"], each["roof_us"]) for each in results})
    panel.plot(*zip(*roof, strict=True), color="black", linewidth=1, label="roof, measured")
    lengths = [length for length, _ in roof]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [str(length) for length in lengths])
    panel.set_xlabel("cached tokens of a sequence")
    panel.grid(which="major", alpha=0.3)


def _figure(**options: Any) -> Any:
    # Not pyplot: it would pick a window system.
    from matplotlib.figure import Figure

    return Figure(**options)
