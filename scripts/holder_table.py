"""Print what becomes of every way to hold a cache on the installed torch; --write commits it.

The table of this torch and device replaces its old one in scripts/results/holders.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "inductor"))

from holders import HOLDERS
from matrix import TABLES, render, rows_of, title

INTRODUCTION = """\
# Ways to hold a cache

What becomes of each program of tests/inductor/holders.py, by torch release and device; written by
`scripts/holder_table.py --write` (`--device cuda` on a GPU). ok: equal to eager, results and all
memory. refused: an error that names operator, argument and fix. pool copies: copies a step of at
least half a layer in Inductor's code; the programs that copy in eager too have them. without the
passes: Inductor as torch ships it. CUDA graph: mode="reduce-overhead", and whether a graph was
recorded (only where a module or a mark makes the memory static).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    options = parser.parse_args()
    table = {}
    with ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=quiet
    ) as pool:
        names = [holder.name for holder in HOLDERS]
        for found in pool.map(partial(rows_of, device=options.device), names):
            for key, cells in found:
                print(f"{' '.join(key)}: {', '.join(cells)}", file=sys.stderr)
                table[key] = cells
    section = f"{title(options.device)}\n\n{render(table)}\n"
    print(section)
    if options.write:
        write(title(options.device), section)


def quiet() -> None:
    warnings.filterwarnings("ignore")


def write(name: str, section: str) -> None:
    text = TABLES.read_text() if TABLES.exists() else INTRODUCTION
    _, *sections = text.split("\n## ")
    by_title = {f"## {each.splitlines()[0]}": f"## {each}" for each in sections}
    by_title[name] = section
    ordered = [by_title[each].strip() for each in sorted(by_title)]
    TABLES.write_text("\n\n".join([INTRODUCTION.strip(), *ordered]) + "\n")


if __name__ == "__main__":
    main()
