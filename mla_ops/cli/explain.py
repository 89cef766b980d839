"""``python -m mla_ops explain package.module:factory``: what keeps a model out of CUDA graphs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mla_ops.cli.options import positive
from mla_ops.diagnostics import explain
from mla_ops.diagnostics.finding import KINDS, Finding
from mla_ops.diagnostics.report import ExplainReport, Facts

__all__ = ["configure", "run"]

MODES = ("default", "reduce-overhead", "max-autotune")
_TARGET = """package.module:factory. The factory takes no arguments and returns the function or
module, or a tuple (fn, args) or (fn, args, kwargs): args is a tuple of the positional arguments,
or a function that makes that tuple from the number of the step. fn is not compiled yet; it runs
under torch.no_grad()."""


class _UserError(Exception):
    """What the user can mend, in one line."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("target", help=_TARGET)
    parser.add_argument("--steps", type=positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--mode", choices=MODES, default="reduce-overhead", help="of torch.compile"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, described below")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if anything is found")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    described = "\n\n".join(
        f"{kind.__name__}: {inspect.getdoc(kind)}" for kind in (ExplainReport, Facts, Finding)
    )
    kinds = "\n".join(f"    {kind}: {cost}" for kind, cost in KINDS.items())
    parser.epilog = f"JSON:\n\n{described}\n\nKINDS:\n{kinds}"


def run(options: argparse.Namespace) -> int:
    """Explain the target and print it; 1 if a step failed, or ``--strict`` found anything."""
    try:
        factory = _load(options.target)
        with torch.no_grad():
            fn, args, kwargs = _unpack(options.target, factory())
    except _UserError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    given: dict[str, Any] = {"inputs": args} if callable(args) else {}
    positional = () if callable(args) else args
    with torch.no_grad():
        report = explain(
            fn, *positional, steps=options.steps, mode=options.mode, **given, **kwargs
        )
    print(report.to_json() if options.json else report)
    failed = any(finding.kind == "step_failed" for finding in report.findings)
    return 1 if failed or (options.strict and not report.ok) else 0


def _load(target: str) -> Callable[[], Any]:
    module_name, _, path = target.partition(":")
    if not module_name or not path or module_name.startswith("."):
        raise _UserError(f"target must be package.module:factory, got {target!r}")
    # As python -m does: modules of the current folder come first.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _UserError(
            f"module {error.name!r} must be importable, found none (run it from the folder that "
            "holds the module, or install it)"
        ) from None
    for name in path.split("."):
        if not hasattr(found, name):
            names = [each for each in dir(found) if not each.startswith("_")]
            raise _UserError(
                f"{module_name} must have {name!r}, it has {', '.join(names) or 'no public name'}"
            )
        found = getattr(found, name)
    if not callable(found) or _needs_arguments(found):
        kind = "one that needs arguments" if callable(found) else type(found).__name__
        raise _UserError(
            f"{target} must be a function without arguments, got {kind} (write one that returns "
            "(fn, args))"
        )
    factory: Callable[[], Any] = found
    return factory


def _needs_arguments(factory: Callable[..., Any]) -> bool:
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return True
    except ValueError:
        # A builtin without a signature: the call will tell.
        return False
    return False


def _unpack(target: str, made: Any) -> tuple[Callable[..., Any], Any, Mapping[str, Any]]:
    """Read what the factory returned."""
    parts = made if isinstance(made, tuple) else (made,)
    fn, args, kwargs = (*parts, *((None, (), {})[len(parts) :]))[:3]
    is_args = callable(args) or isinstance(args, tuple | list)
    if len(parts) > 3 or not callable(fn) or not is_args or not isinstance(kwargs, Mapping):
        shown = ", ".join(type(part).__name__ for part in parts)
        raise _UserError(
            f"{target} must return fn, (fn, args) or (fn, args, kwargs) with args a tuple, "
            f"got ({shown})"
        )
    return fn, args, kwargs
