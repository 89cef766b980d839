"""Compile a Triton or Gluon kernel for a GPU that is not here, and read what it costs."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class CompiledStats(NamedTuple):
    registers: int
    spills: int  # LDL + STL instructions
    shared: int  # bytes
    sass: str


def compile_offline(kernel, signature, constexprs, arch, num_warps=4, aligned=(), **options):
    """Compile ``kernel`` for ``arch`` (80, 90, 100, 120) without a device.

    ``signature`` maps argument names to types ("*bf16", "i32", "fp32"); ``constexprs`` maps the
    others to values; ``aligned`` names integers divisible by 16, as pointers are taken to be.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constexprs.items()}
    divisible = [n for n, t in signature.items() if t.startswith("*") or n in aligned]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source_class = ASTSource
    if "gluon" in type(kernel).__module__:
        from triton.experimental.gluon._runtime import GluonASTSource as source_class
    source = source_class(kernel, types, values, attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps, **options}
    )
    return read(compiled)


def read(compiled):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        Path(cubin).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run(
            [tool, "-sass", cubin], capture_output=True, text=True, check=True
        ).stdout
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return CompiledStats(registers, spills, compiled.metadata.shared, sass)
