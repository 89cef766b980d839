"""Reading the Python that Inductor generates: operator launches, kernels, partitions, copies."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from mla_ops.diagnostics.copies import COPYING, BigCopy, Size

__all__ = ["CodeFacts", "read_code"]

# Functions of the generated module that are not part of a step.
_NOT_A_STEP = ("get_args", "benchmark_compiled_module", "__init__", "recursively_apply_fns")
_LOOP = re.compile(r"^( *)for\(.*?;\s*\w+\s*<\s*(?:static_cast<int64_t>\()?(\w+?)L?\)?\s*;", re.M)
_PARAMETERS = re.compile(r"(?:def \w+|\bvoid\s+\w+)\(([^)]*)\)")
_WRITTEN = ("out_ptr", "in_out_ptr")


@dataclass
class CodeFacts:
    """What one generated module does in one step."""

    # Calls of torch operators by "namespace.name".
    launches: Counter[str] = field(default_factory=Counter)
    # Calls of kernels that Inductor generated.
    kernels: int = 0
    # Pieces that CUDA graphs may record; 0 where the module is not partitioned.
    partitions: int = 0
    copies: list[BigCopy] = field(default_factory=list)


def read_code(
    code: str, inputs: Mapping[str, Size], symbols: Mapping[str, int], big_bytes: int
) -> CodeFacts | None:
    """Read one generated module.

    Args:
        code: the Python text.
        inputs: the tensors it is given, by the name they have in the code.
        symbols: values of the symbols that stand for dynamic sizes.
        big_bytes: from how many bytes on a copied buffer is reported.

    Returns:
        CodeFacts, or None when the text is not such a module (a C++ wrapper).
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    reader = _Reader(inputs, symbols, big_bytes)
    reader.read(tree)
    return reader.facts if reader.is_step else None


class _Reader:
    def __init__(
        self, inputs: Mapping[str, Size], symbols: Mapping[str, int], big_bytes: int
    ) -> None:
        self.facts = CodeFacts()
        self.is_step = False
        self._inputs = inputs
        self._symbols = dict(symbols)
        self._big_bytes = big_bytes
        self._kernels: dict[str, str] = {}
        # One map for all pieces: a buffer keeps its name where it is handed from one to the next.
        self._buffers: dict[str, Size] = dict(inputs)
        self._roots: dict[str, str] = {}

    def read(self, tree: ast.Module) -> None:
        for definition in tree.body:
            if isinstance(definition, ast.Assign):
                self._remember_kernel(definition)
        for function in _functions(tree):
            self.is_step = self.is_step or function.name == "call"
            self.facts.partitions += function.name.startswith("partition_")
            for statement in _statements(function):
                if isinstance(statement, ast.Assign):
                    self._assign(statement)
                for node in ast.walk(statement):
                    if isinstance(node, ast.Call):
                        self._call(node)

    def _remember_kernel(self, node: ast.Assign) -> None:
        """Keep the source of ``name = async_compile.triton(...)`` and its C++ kin."""
        if isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            texts = [
                value.value
                for value in node.value.args
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            ]
            if _dotted(node.value.func).startswith("async_compile.") and texts:
                self._kernels[node.targets[0].id] = max(texts, key=len)

    def _assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        if not isinstance(target, ast.Name):
            return
        if isinstance(value, ast.Call) and _dotted(value.func).startswith("empty_strided"):
            size = self._allocation(value)
            if size is not None:
                self._buffers[target.id] = size
            return
        reused = self._root(value)
        is_view = isinstance(value, ast.Name) or (
            isinstance(value, ast.Call) and _dotted(value.func) == "reinterpret_tensor"
        )
        if is_view and reused is not None:
            self._roots[target.id] = reused

    def _allocation(self, call: ast.Call) -> Size | None:
        if len(call.args) < 2 or not isinstance(call.args[0], ast.Tuple):
            return None
        sizes = [self._number(size) for size in call.args[0].elts]
        dtypes = [_dotted(arg) for arg in [*call.args, *(word.value for word in call.keywords)]]
        dtype = next((name for name in dtypes if name.startswith("torch.")), "")
        itemsize = getattr(getattr(torch, dtype.removeprefix("torch."), None), "itemsize", None)
        if itemsize is None or any(size is None for size in sizes):
            return None
        return Size(math.prod(size for size in sizes if size is not None), itemsize)

    def _number(self, node: ast.expr) -> int | None:
        """Evaluate a size: integers, known symbols, and the arithmetic of both."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else None
        if isinstance(node, ast.Name):
            return self._symbols.get(node.id)
        if isinstance(node, ast.BinOp):
            left, right = self._number(node.left), self._number(node.right)
            if left is None or right is None:
                return None
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
        return None

    def _root(self, node: ast.expr) -> str | None:
        """Name the buffer behind an argument: itself, or what a view of it was made from."""
        if isinstance(node, ast.Call) and node.args:
            return self._root(node.args[0])
        if not isinstance(node, ast.Name):
            return None
        return self._roots.get(node.id, node.id)

    def _call(self, node: ast.Call) -> None:
        name = _dotted(node.func)
        kernel = name.removesuffix(".run")
        if kernel in self._kernels:
            self.facts.kernels += 1
            self._kernel_copies(kernel, node)
        elif name.startswith("torch.ops."):
            operator = ".".join(name.split(".")[2:4])
            self.facts.launches[operator] += 1
            if operator in COPYING and node.args:
                self._operator_copy(operator, node.args[0])
        elif name.endswith(".copy_") and isinstance(node.func, ast.Attribute) and node.args:
            target, source = self._root(node.func.value), self._root(node.args[0])
            if target != source and self._big(target):
                self._operator_copy("copy_", node.args[0], target)

    def _operator_copy(self, operator: str, copied: ast.expr, target: str | None = None) -> None:
        source = self._root(copied)
        size = self._view_size(copied, self._big(source))
        if size is not None and size.bytes >= self._big_bytes:
            buffers = tuple(name for name in (source, target) if name)
            self.facts.copies.append(BigCopy(size.bytes, f"{operator}({source})", buffers))

    def _view_size(self, node: ast.expr, whole: Size | None) -> Size | None:
        """Measure a ``reinterpret_tensor`` of a buffer by its own sizes, where they show."""
        if whole is None or not isinstance(node, ast.Call) or len(node.args) < 2:
            return whole
        if not isinstance(node.args[1], ast.Tuple):
            return whole
        sizes = [self._number(size) for size in node.args[1].elts]
        numel = math.prod(size for size in sizes if size is not None)
        return whole if None in sizes else Size(numel, whole.itemsize)

    def _big(self, name: str | None) -> Size | None:
        size = None if name is None else self._buffers.get(name)
        return size if size is not None and size.bytes >= self._big_bytes else None

    def _kernel_copies(self, kernel: str, call: ast.Call) -> None:
        """Report each big buffer the kernel fills while it reads another big one.

        At least one of the two is an input of the graph: arithmetic between big activations is
        no copy of anything that lives longer than the step.
        """
        source = self._kernels[kernel]
        match = _PARAMETERS.search(source)
        names = [] if match is None else [_parameter(text) for text in match[1].split(",")]
        passed = list(zip(names, (self._root(argument) for argument in call.args), strict=False))
        read = {
            root for name, root in passed if self._big(root) and self._reads(source, name, root)
        }
        elements = self._iterations(source, call)
        for name, root in passed:
            size = self._big(root) if name.startswith(_WRITTEN) else None
            others = read - {root}
            if size is None or not others:
                continue
            of_the_graph = root in self._inputs or any(other in self._inputs for other in others)
            dense = elements is None or elements * size.itemsize >= self._big_bytes
            if of_the_graph and dense:
                sources = sorted(map(str, others))
                text = f"{kernel}({', '.join(sources)} -> {root})"
                self.facts.copies.append(BigCopy(size.bytes, text, (*sources, str(root))))

    def _reads(self, source: str, name: str, root: str | None) -> bool:
        """Tell whether a kernel reads a parameter; of its outputs, an input of the graph too."""
        # A row of a cache written, then all of it read, in one kernel.
        again = rf"(?:loadu?\(| = ){re.escape(name)}\b"
        return name.startswith("in_") or (
            root in self._inputs and re.search(again, source) is not None
        )

    def _iterations(self, source: str, call: ast.Call) -> int | None:
        """Count the elements a kernel visits; None when it does not show."""
        if "@triton.jit" in source:
            numbers = [self._number(argument) for argument in call.args]
            counts = [number for number in numbers if number is not None]
            return math.prod(counts) if counts else None
        return _largest_nest(source, self._symbols)


def _largest_nest(source: str, symbols: Mapping[str, int]) -> int | None:
    """Multiply the bounds of the C++ loops that enclose each other; return the largest product."""
    stack: list[tuple[int, int]] = []
    largest = 0
    for indent, bound in _LOOP.findall(source):
        count = int(bound) if bound.isdigit() else symbols.get(bound)
        if count is None:
            return None
        while stack and stack[-1][0] >= len(indent):
            stack.pop()
        stack.append((len(indent), count))
        largest = max(largest, math.prod(count for _, count in stack))
    return largest or None


def _parameter(text: str) -> str:
    # C++ namespaces (at::BFloat16* out_ptr0) are no Python annotations (XBLOCK : tl.constexpr).
    words = text.replace("::", ".").split(":")[0].replace("*", " ").split()
    return words[-1] if words else ""


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in _NOT_A_STEP:
            yield node


def _statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Yield the simple statements of a function in order, those inside blocks included."""
    pending: list[ast.stmt] = list(reversed(function.body))
    while pending:
        statement = pending.pop()
        body = getattr(statement, "body", None)
        if body is None:
            yield statement
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            pending.extend(reversed(getattr(statement, "orelse", [])))
            pending.extend(reversed(body))


def _dotted(node: ast.expr) -> str:
    """Spell ``a.b.c``; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        prefix = _dotted(node.value)
        return f"{prefix}.{node.attr}" if prefix else node.attr
    return ""
