"""What decode_loop.py prints: figures of all ranks together, and what is wrong with them."""

from __future__ import annotations

from typing import Any

from _loop_worker import Result, Settings

# Compiled against eager at batch 16 on an H200.
MIN_RATIO = 3.0
_SHOWN_FAULTS = 5


def problems(settings: Settings, results: list[Result]) -> list[str]:
    """List every fault, and every capture that was not what was asked for."""
    found = [fault for result in results for fault in result.faults]
    if not sum(result.checks for result in results):
        found.append("no step was checked")
    for rank, result in enumerate(results):
        seen, sizes = result.captured, len(settings.batch_sizes)
        if settings.capture == "none" or settings.device == "cpu":
            continue
        if seen.skips != 0:
            found.append(f"rank {rank}: {seen.skips} skips {'; '.join(seen.reasons)}".strip())
        # A recording too few: a size was not captured. A replay too few: a step was not.
        if seen.recordings != sizes:
            found.append(f"rank {rank}: {seen.recordings} recordings of {sizes} sizes")
        if seen.replays != settings.steps:
            found.append(f"rank {rank}: {seen.replays} replays in {settings.steps} steps")
    return found


def summary(settings: Settings, results: list[Result]) -> dict[str, Any]:
    """Return the settings and the figures of a run; of a run that died only the settings."""
    facts: dict[str, Any] = {**vars(settings), "how": _how(settings)}
    if not results:
        return facts
    # The ranks meet at each step: the slowest has the clock of all.
    seconds = max(result.decode_seconds for result in results)
    live = sum(result.live_rows for result in results)
    padded = sum(result.padded_rows for result in results)
    return facts | {
        "steps_per_second": settings.steps / seconds,
        "tokens_per_second": live / seconds,
        "graphs": [result.captured.graphs for result in results],
        "recordings": [result.captured.recordings for result in results],
        "replays": [result.captured.replays for result in results],
        "skips": [result.captured.skips for result in results],
        "padding_waste": 1 - live / padded,
        "dummy_batches": [result.dummy_batches for result in results],
        "steps_of_size": dict(sorted(results[0].sizes.items())),
        "requests_finished": sum(result.finished for result in results),
        "num_pages": settings.num_pages,
        "pages_handed_out": [result.pages_handed_out for result in results],
        "steps_checked": [result.checks for result in results],
        "warm_up_seconds": max(result.warm_up_seconds for result in results),
    }


def _how(settings: Settings) -> str:
    if settings.capture == "none":
        return "eager"
    if settings.capture == "full-graph":
        return "captured by hand, a CUDA graph for each size"
    if settings.device == "cpu":
        return "compiled; the CPU has no CUDA graphs"
    return "compiled, CUDA graphs by torch.compile"


def as_text(report: dict[str, Any]) -> str:
    """Return a table of each run, then the verdict."""
    lines = []
    for run in report["runs"]:
        faults = run["problems"]
        facts = {name: value for name, value in run.items() if name not in ("problems", "plant")}
        width = max(map(len, facts))
        lines += [f"{name:{width}}  {_shown(value)}" for name, value in facts.items()]
        lines += [f"FAULT: {fault}" for fault in faults[:_SHOWN_FAULTS]]
        if len(faults) > _SHOWN_FAULTS:
            lines.append(f"... and {len(faults) - _SHOWN_FAULTS} more")
        lines.append("")
    if "ratio" in report:
        lines.append(
            f"steps/s against eager: {report['ratio']:.2f}x (an H200 must reach {MIN_RATIO:g}x)"
        )
    lines.append("passed" if report["passed"] else "FAILED")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, list) and set(value) == {None}):
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}" if value < 100 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return " ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    return str(value)
