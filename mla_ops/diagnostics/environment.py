"""What this machine runs with: versions, GPUs, driver; for bug reports and benchmark results."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Mapping
from typing import TypedDict

import torch

__all__ = ["Environment", "environment"]

_SMI_TIMEOUT_S = 20


class Environment(TypedDict):
    """Versions and devices; nothing that names the user or the machine.

    Attributes:
        mla_ops: version of this package; null when it runs from a folder without installation.
        python: version of Python.
        platform: operating system and processor.
        threads: threads of torch on the CPU.
        torch: version of torch.
        cuda: CUDA version that torch was built for; null for a build without CUDA.
        cuda_problem: why torch reaches no GPU, with the command that mends it; null if it does.
        driver: version of the NVIDIA driver; null if nvidia-smi does not tell.
        gpus: name, compute capability, multiprocessors and memory of each GPU that torch sees.
        triton: distribution and version that provides ``triton``, as the next two; null if none.
        flash_mla: distribution and version that provides ``flash_mla``.
        transformers: distribution and version that provides ``transformers``.
    """

    mla_ops: str | None
    python: str
    platform: str
    threads: int
    torch: str
    cuda: str | None
    cuda_problem: str | None
    driver: str | None
    gpus: list[str]
    triton: str | None
    flash_mla: str | None
    transformers: str | None


def environment() -> Environment:
    """Look at versions and devices; imports none of the packages it reports."""
    owners = importlib.metadata.packages_distributions()
    driver = _driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "mla_ops": _version("mla_ops"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_problem": _cuda_problem(driver),
        "driver": driver,
        "gpus": [_gpu(index) for index in range(count)],
        "triton": _owner("triton", owners),
        "flash_mla": _owner("flash_mla", owners),
        "transformers": _owner("transformers", owners),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _owner(module: str, owners: Mapping[str, list[str]]) -> str | None:
    names = owners.get(module, ())
    return ", ".join(f"{name} {_version(name)}" for name in sorted(set(names))) or None


def _driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # One line a GPU, all the same.
    return answer.stdout.split("\n")[0].strip() or None


def _cuda_problem(driver: str | None) -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        where = "" if driver else "on a machine with an NVIDIA GPU and its driver: "
        return (
            f"torch {torch.__version__} is built without CUDA "
            f"({where}pip install --force-reinstall torch)"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        return f"{reason} (nvidia-smi must list a GPU)"
    return "torch sees no GPU (unset CUDA_VISIBLE_DEVICES)"


def _gpu(index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    return (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.multi_processor_count} SMs, {facts.total_memory / 2**30:.0f} GiB"
    )
