"""``python -m mla_ops explain package.module:factory``: what keeps a model out of CUDA graphs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mla_ops.cli.options import positive
from mla_ops.diagnostics.explain import explain_calls
from mla_ops.diagnostics.finding import KINDS, Finding
from mla_ops.diagnostics.report import ExplainReport, Facts

__all__ = ["configure", "run"]

MODES = ("default", "reduce-overhead", "max-autotune")
_TARGET = """package.module:factory. The factory takes no arguments and returns the function or
module, or a tuple (fn, args) or (fn, args, kwargs): args is a tuple of the positional arguments,
or a function that makes that tuple from the number of the step. fn is not compiled yet; it runs
under torch.no_grad()."""

Inputs = Callable[[int], Sequence[Any]]


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
            fn, inputs, kwargs = _unpack(options.target, _make(options.target, factory))
            report = explain_calls(fn, inputs, kwargs, steps=options.steps, mode=options.mode)
    except _UserError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(report.to_json() if options.json else report)
    failed = any(finding.kind == "step_failed" for finding in report.findings)
    return 1 if failed or (options.strict and not report.ok) else 0


def _load(target: str) -> Callable[[], Any]:
    module_name, _, path = target.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise _UserError(
            f"target must be package.module:factory, got a file in {target!r} (write "
            f"{dotted}:{path or 'factory'}, in the folder it begins in)"
        )
    if not module_name or not all(path.split(".")) or module_name.startswith("."):
        name = module_name.strip(".") or "models"
        raise _UserError(
            f"target must be package.module:factory, got {target!r} (write "
            f"`def factory(): return model, (x,)` in {name.replace('.', '/')}.py, then explain "
            f"{name}:factory)"
        )
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
                f"{module_name} must have {name!r}, it has {', '.join(names) or 'no public name'} "
                "(name a function of it that returns (fn, args))"
            )
        found = getattr(found, name)
    if not callable(found) or not _accepts(found):
        kind = "one that needs arguments" if callable(found) else type(found).__name__
        raise _UserError(
            f"{target} must be a function without arguments, got {kind} (write one that returns "
            "(fn, args))"
        )
    factory: Callable[[], Any] = found
    return factory


def _accepts(fn: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    except ValueError:
        # A builtin without a signature: the call will tell.
        return True
    return True


def _make(target: str, factory: Callable[[], Any]) -> Any:
    """Call the factory; its own errors keep their traceback, a missing GPU is told in a line."""
    try:
        return factory()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        if torch.cuda.is_available() or not re.search(r"CUDA|NVIDIA", reason):
            raise
        raise _UserError(
            f"{target} must make its model where torch finds no GPU, got {reason!r} (make it on "
            "the CPU: most causes show there too; python -m mla_ops doctor tells why)"
        ) from None


def _unpack(target: str, made: Any) -> tuple[Callable[..., Any], Inputs, Mapping[str, Any]]:
    """Read what the factory returned."""
    parts = made if isinstance(made, tuple) else (made,)
    fn, args, kwargs = (*parts, *((None, (), {})[len(parts) :]))[:3]
    is_args = callable(args) or isinstance(args, tuple | list)
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if len(parts) > 3 or not callable(fn) or not is_args or not is_named:
        shown = ", ".join(type(part).__name__ for part in parts)
        raise _UserError(
            f"{target} must return fn, (fn, args) or (fn, args, kwargs) with args a tuple and "
            f"kwargs a dict of names, got ({shown})"
        )
    if not callable(args):
        return fn, lambda step: args, kwargs
    if not _accepts(args, 0):
        raise _UserError(
            f"{target}: args must be a tuple or a function of the step's number, got a function "
            "of other arguments (write lambda step: (x,))"
        )

    def inputs(step: int) -> Sequence[Any]:
        found = args(step)
        if not isinstance(found, tuple | list):
            raise _UserError(
                f"{target}: args(step) must return a tuple, got {type(found).__name__} "
                "(return (x,))"
            )
        return found

    return fn, inputs, kwargs
