"""Findings about Dynamo: graph breaks, and recompilations with the guard that failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mla_ops.diagnostics.finding import Finding
from mla_ops.diagnostics.lines import is_outer, readable_name, user_line
from mla_ops.diagnostics.measurement import GraphBreak, Measurement, Recompile
from mla_ops.diagnostics.watch import WatchedGraph

__all__ = ["compile_findings", "untraced_findings"]

# What a break is about -> its operator and what mends it; {0} is what the pattern found.
_BREAKS = (
    (r"Tensor\.item\(\)", "Tensor.item", "keep the value a tensor; do not call .item() on it"),
    (
        r"Tensor\.tolist\(\)",
        "Tensor.tolist",
        "keep the values a tensor; do not call .tolist() on it",
    ),
    (r"bind arguments", "", "call it with the arguments that its signature has"),
    (r"generic_jump|Data-dependent branching", "if", "choose with torch.where or torch.cond"),
    (r"builtin operator `print`", "print", "print outside the compiled function"),
    (r"builtin operator `(\w+)`", "{0}", "call {0} outside the compiled function"),
    (
        r"function marked as skipped[\s\S]*module: ([\w.]+), qualname: ([\w.]+)",
        "{0}.{1}",
        "call {0}.{1} outside the compiled function",
    ),
    (
        r"RNN, GRU, or LSTM[\s\S]*context: (\w+)",
        "{0}",
        "torch._dynamo.config.allow_rnn = True before the first call; torch calls it experimental",
    ),
    (
        r"`torch\.compiler\.disable\(\)`",
        "torch.compiler.disable",
        "call the disabled function before or after the step, or remove the decorator",
    ),
    (
        r"Dynamic shape operator|output shape depends",
        "",
        "give the result a fixed size: a mask with torch.where, torch.nonzero_static(size=...)",
    ),
    (
        r"running with fake tensors|fake kernel|Operator does not support",
        "",
        "give the operator a fake: torch.library.register_fake",
    ),
    (r"torch\._dynamo\.graph_break\(\)", "torch._dynamo.graph_break", "remove the call"),
)
_OPERATOR = re.compile(r"context: ((?:aten|prims|\w+)\.\w+(?:\.\w+)?)|`(\w+\.\w+\.\w+)`")
# Hints that mend something; torch has others, for whoever works on torch.
_HINT = re.compile(r"Hint: (?!It may be possible to write Dynamo|This is likely to be a)(.+)")
_ENTRY = re.compile(r"^\[?\d+/(\d+)")
_SHAPE = re.compile(r"tensor '([^']+)' (\w+(?: \w+)*) mismatch(.*)")
_SIZE_OF = re.compile(r"(L\[.+?\]|\w[\w.\[\]']*)\.(?:size|stride)\(\)\[(\d+)\]")
_NUMBER = re.compile(r".+\s==\s*-?[\d.]+(?:e[-+]?\d+)?(?:\s|$)")
_CALL = re.compile(r"[\w.]+\(")
# How torch 2.11 writes a number that it traces as a tensor.
_AS_TENSOR = re.compile(r"___as_tensor\((.+?)\)\.item\(\)")
# A name with what is reached from it, as in (2.0*self.layers[0].scale); no call.
_PATH = re.compile(r"(?<![\w.'\"\]])[A-Za-z_]\w*(?:\.\w+|\[[^\[\]]*\])*(?![\w.(\[])")
_NO_NAMES = frozenset(("not", "is", "in", "and", "or", "None", "True", "False"))
_TORCH_STATE = re.compile(r"GLOBAL_STATE changed: (\w+)")


def compile_findings(
    measured: Measurement,
    graphs: Iterable[WatchedGraph],
    argument_names: Mapping[str, str],
    *,
    cudagraphs: bool,
) -> Iterator[Finding]:
    """Explain breaks and recompilations.

    Args:
        measured: what the recorder saw.
        graphs: the graphs the backend was given.
        argument_names: of the function, where Dynamo only has args[0].
        cudagraphs: whether CUDA graphs are asked for: they want a few fixed sizes.
    """
    yield from map(_break, measured.breaks or ())
    lines = {each.name: each.where for graph in graphs for each in graph.inputs if each.where}
    found = [
        _recompile(each, lines, argument_names if is_outer(each.compile_id) else {}, cudagraphs)
        for each in measured.recompiles or ()
    ]
    # Later guards of a value come without a line.
    told = {each.argument: each.where for each in found if each.where}
    yield from (replace(each, where=each.where or told.get(each.argument)) for each in found)


def untraced_findings(measured: Measurement, reasons: Iterable[str]) -> Iterator[Finding]:
    """Explain why nothing was compiled, where torch does not log it: no line is known.

    Args:
        measured: what the recorder saw.
        reasons: what Dynamo could not trace.
    """
    if measured.graphs == 0 and not measured.breaks:
        yield from (_break(GraphBreak(reason, "unknown line", False)) for reason in reasons)


def _break(entry: GraphBreak) -> Finding:
    what = entry.reason.strip().split("\n")[0]
    hint = _HINT.search(entry.reason)
    operator, fix = "", hint[1] if hint else "move the line out of the compiled function"
    for pattern, name, known in _BREAKS:
        match = re.search(pattern, entry.reason)
        if match:
            operator, fix = (text.format(*match.groups()) for text in (name, known))
            break
    named = _OPERATOR.search(entry.reason)
    if not operator and named:
        operator = named[1] or named[2]
    if not entry.resumed:
        what += "; torch leaves the rest of the function to Python"
    where = None if entry.where == "unknown line" else entry.where
    return Finding("graph_break", what, fix, where, operator=operator or None)


def _recompile(
    recompile: Recompile,
    lines: dict[str, str],
    argument_names: Mapping[str, str],
    cudagraphs: bool,
) -> Finding:
    guard = _latest(recompile.guards)
    # The guard, then "# the line  # file in function", then a stack of the user's lines.
    text = _ENTRY.sub("", guard.split("\n")[0]).removeprefix(": ").split("  #")[0].strip()
    text = _AS_TENSOR.sub(r"\1", text)
    where = user_line(guard)
    what = f"the guard failed: {readable_name(text, argument_names) or 'unknown'}"
    shape, size = _SHAPE.search(text), _SIZE_OF.search(text)
    if shape or size:
        name = readable_name(shape[1] if shape else size[1] if size else "", argument_names)
        fix = _size_fix(name, shape[2] if shape else "size", text, cudagraphs)
        where = where or lines.get(name) or _any(lines)
        return Finding("recompile_shape", what, fix, where, argument=name)
    state = _TORCH_STATE.match(text)
    if state:
        fix = f"set {state[1]} of torch once, before the first step"
        return Finding("recompile_other", what, fix, where)
    source = next((each for each in _PATH.findall(text) if each not in _NO_NAMES), "")
    name = readable_name(source, argument_names)
    where = where or lines.get(name)
    tensor = f"torch.tensor({name})"
    if source.startswith("G[") and "==" in text:
        fix = f"pass {name} as an argument: {tensor} on the model's device; or never change it"
        return Finding("recompile_global", what, fix, where, argument=name)
    if text.startswith("len("):
        fix = f"give {name} the same length at every step"
        return Finding("recompile_other", what, fix, where, argument=name or None)
    # Of list(dict.keys(d))[0] == 0 the number is none of the user's.
    if name and _NUMBER.match(text) and not _CALL.match(text):
        fix = f"make {name} a tensor: {tensor} on the model's device, written in place"
        return Finding("recompile_value", what, fix, where, argument=name)
    fix = f"make {name or 'what the guard names'} the same at every step"
    return Finding("recompile_other", what, fix, where, argument=name or None)


def _latest(guards: tuple[str, ...]) -> str:
    """Choose the guard of the newest graph: the older ones had failed before."""

    def entry(guard: str) -> int:
        match = _ENTRY.match(guard)
        return int(match[1]) if match else -1

    return max(guards, key=entry, default="")


def _size_fix(name: str, what: str, text: str, cudagraphs: bool) -> str:
    if not what.endswith("size"):
        return f"give {name} the same {what} at every step"
    if cudagraphs:
        return f"pad {name} to one of a few sizes; each size is a graph and a CUDA graph"
    index = re.search(r"index (\d+)|\(\)\[(\d+)\]", text)
    dimension = next(filter(None, index.groups()), "0") if index else "0"
    return f"torch._dynamo.mark_dynamic({name}, {dimension}) before the first call"


def _any(lines: dict[str, str]) -> str | None:
    return next(iter(lines.values()), None)
