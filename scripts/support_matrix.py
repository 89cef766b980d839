"""Print the support matrix, or write it into README.md with --write."""

from __future__ import annotations

import sys
from pathlib import Path

from mla_ops.testing.support import support_matrix

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def main() -> None:
    matrix = support_matrix()
    if "--write" not in sys.argv[1:]:
        print(matrix)
        return
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    README.write_text(f"{head}{BEGIN}\n{matrix}\n{END}{tail}")


if __name__ == "__main__":
    main()
