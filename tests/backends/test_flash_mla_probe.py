"""What the adapter finds, why it does not run and the command that mends it; no GPU needed."""

import flash_mla_stubs as stubs
import pytest
import torch
from flash_mla_stubs import install_stub  # noqa: F401

from mla_ops.backends import flash_mla
from mla_ops.shapes import DecodeShape

REASONS = {
    "absent": ({}, "flash_mla is not installed", "pip install"),
    "broken": (stubs.BROKEN, "OSError: libcudart.so.12: cannot open", "--force-reinstall"),
    "dependency": (stubs.BROKEN_DEPENDENCY, "a_module_that_is_not_there", "--force-reinstall"),
    "without_dense": (stubs.WITHOUT_DENSE, "flash_mla 9.9 has no dense decode", "pip install"),
    "signature": (stubs.OTHER_SIGNATURE, "flash_mla_legacy::dense_decode_fwd has another", "pip"),
}


@pytest.mark.parametrize("case", REASONS)
def test_reason_and_the_command_that_mends_it(install, monkeypatch, case):
    files, reason, command = REASONS[case]
    install(files)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    reasons = " ".join(flash_mla.unavailable(torch.device("cuda", 0)))
    assert reason in reasons
    assert command in reasons


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), True), ((8, 0), False), ((10, 0), False)]
)
def test_architecture(install, monkeypatch, capability, runs):
    install(stubs.LEGACY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reasons = flash_mla.unavailable(torch.device("cuda", 0))
    assert bool(reasons) != runs
    if not runs:
        assert f"cuda:0 has {capability[0]}.{capability[1]}" in reasons[0]


def test_cpu_tensors_and_missing_devices_are_named(install, monkeypatch):
    install(stubs.LEGACY)
    assert "the tensors are on cpu" in flash_mla.unavailable(torch.device("cpu"))[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device" in flash_mla.unavailable(torch.device("cuda"))[0]


SHAPE = DecodeShape(
    *(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, 4, 1, 16, 576, 512),
    *(100, 64, 8, 64 * 576, 576),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16}, None),
        ({"out_dtype": torch.bfloat16}, None),
        ({"out_dtype": torch.float32}, "writes torch.bfloat16 like q, out is torch.float32"),
        ({"page_stride": 64 * 584, "row_stride": 584, "num_heads_q": 3, "seqlen_q": 8}, None),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 512}, "head_dim 576"),
        ({"head_dim": 160, "head_dim_v": 128}, "head_dim 576"),
        ({"page_size": 128}, "page_size 64"),
        ({"row_stride": 577}, "row strides"),
        ({"page_stride": 64 * 576 + 4}, "page strides"),
        ({"page_stride": 0}, "page strides"),
    ],
)
def test_unsupported_names_what_it_takes(change, reason):
    reasons = flash_mla.unsupported(SHAPE._replace(**change))
    assert bool(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]
