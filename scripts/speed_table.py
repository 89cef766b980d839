"""Print the README's table of decode times from scripts/results/; --write puts it there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "scripts" / "results" / "decode_h200.json"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
SHAPES = (
    *((1, 16, 1024), (1, 16, 4096), (1, 16, 16384), (1, 64, 16384), (1, 128, 16384)),
    *((8, 16, 1024), (8, 16, 4096), (32, 16, 4096), (128, 16, 4096), (128, 128, 4096)),
)


def speed_table() -> str:
    """Return us by shape as Markdown: FlashMLA as it is, auto, and the portable kernels."""
    record = json.loads(RESULTS.read_text())
    found = {(row["b"], row["h"], row["k"]): row["us"] for row in record["results"]}
    lines = [
        f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, {record['date']}; "
        "bf16, us in a CUDA graph.",
        "",
        "| batch, heads, tokens | FlashMLA | auto | FlashMLA / auto | triton |",
        "|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        us = found[shape]
        lines.append(
            f"| {', '.join(map(str, shape))} | {us['FM']:.1f} | {us['auto']:.1f} "
            f"| {us['FM'] / us['auto']:.2f} | {us['triton']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(speed_table())
        return
    readme = ROOT / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n{speed_table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
