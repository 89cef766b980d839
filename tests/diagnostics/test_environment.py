"""Versions and devices are told as they are, and what keeps torch from a GPU with its fix."""

import importlib.metadata

import pytest
import torch

from mla_ops.diagnostics.environment import environment


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def nvidia_smi(folder, monkeypatch, script):
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_distributions_are_named_with_their_version(monkeypatch, without_gpu):
    owners = {"triton": ["pytorch-triton"], "flash_mla": ["b", "a", "a"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.{len(name)}")
    seen = environment()
    assert seen["triton"] == "pytorch-triton 1.14"
    assert seen["flash_mla"] == "a 1.1, b 1.1"
    assert seen["transformers"] is None
    assert seen["torch"] == torch.__version__
    assert seen["gpus"] == []


def test_a_package_that_is_not_installed_has_no_version(monkeypatch, without_gpu):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert environment()["mla_ops"] is None


@pytest.mark.parametrize(
    ("script", "driver"), [("echo 570.1; echo 570.1", "570.1"), ("exit 9", None), ("", None)]
)
def test_driver_is_what_nvidia_smi_says(script, driver, tmp_path, monkeypatch, without_gpu):
    nvidia_smi(tmp_path, monkeypatch, script)
    assert environment()["driver"] == driver


def test_no_nvidia_smi_is_no_driver(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["driver"] is None


@pytest.mark.parametrize(
    ("build", "script", "error", "problem"),
    [
        (None, "echo 1", None, "built without CUDA (pip install --force-reinstall torch)"),
        (None, "exit 9", None, "(on a machine with an NVIDIA GPU and its driver: pip install"),
        ("13.0", "echo 1", "No driver\nmore", "No driver (nvidia-smi must list a GPU)"),
        ("13.0", "echo 1", None, "torch sees no GPU (unset CUDA_VISIBLE_DEVICES)"),
    ],
)
def test_what_keeps_torch_from_a_gpu(
    build, script, error, problem, tmp_path, monkeypatch, without_gpu
):
    def init():
        if error:
            raise RuntimeError(error)

    nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert problem in environment()["cuda_problem"]


@pytest.mark.gpu
def test_a_gpu_is_described():
    seen = environment()
    assert seen["cuda_problem"] is None
    assert "compute capability" in seen["gpus"][0]
