"""``python -m mla_ops <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

# Each command is a module of mla_ops.cli with ``configure(parser)`` and ``run(options) -> int``.
COMMANDS = {
    "demo": "decode with a small model, eagerly and captured, and check every claim",
    "explain": "tell what keeps a model out of CUDA graphs: cause, line and fix",
    "doctor": "check versions, backends and operators; the text is made for an issue",
    "bench": "time a decode by backend, mode, batch and length against the roofline",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; None means ``sys.argv``.

    Returns:
        int: the exit status, 0 when all went as claimed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mla_ops", description="MLA decode operators for torch.compile."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        import_module(f"mla_ops.cli.{name}").configure(command)
    options = parser.parse_args(arguments)
    status: int = import_module(f"mla_ops.cli.{options.command}").run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
