"""A named backend runs or raises with every reason, eager, fake and compiled; auto never fails."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from refusals import good_arguments
from torch._subclasses import FakeTensorMode

from mla_ops import BackendUnavailableError, backend_report, mla_decode
from mla_ops.cli.bench_step import StepShape
from mla_ops.ops import _selection
from mla_ops.ops._selection import (
    BACKENDS,
    _preferences,
    device_kernel,
    reasons_against,
    select,
)
from mla_ops.shapes import LATENT_ROPE_PAIRS, DecodeShape

GPU_BACKENDS = ("flash_mla", "gluon", "triton")
CANNOT = "mla_decode: backend must be able to run this call, got {!r}: .*use backend='auto'"


def arguments(device="cpu"):
    given = good_arguments("mla_decode", device)
    del given["tile_scheduler_metadata"], given["num_splits"]
    return given


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_gpu_backend_is_refused_on_the_cpu(backend):
    with pytest.raises(BackendUnavailableError, match=CANNOT.format(backend)) as caught:
        mla_decode(**arguments(), backend=backend)
    assert "the tensors are on cpu" in str(caught.value)
    torch._dynamo.reset()
    compiled = torch.compile(mla_decode, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=CANNOT.format(backend)):
        compiled(**arguments(), backend=backend)


@pytest.mark.parametrize("backend", ["flash_mla", "gluon"])
def test_a_shape_that_a_backend_cannot_run_is_refused_in_the_fake(backend):
    """Float32, 128 + 32, page 4: told at trace time for a device that is not here."""
    with FakeTensorMode():
        given = arguments("cuda")
        with pytest.raises(BackendUnavailableError, match=CANNOT.format(backend)):
            mla_decode(**given, backend=backend)
        mla_decode(**given, backend="auto")


def test_a_backend_that_cannot_write_float32_is_refused_by_name():
    """Never a silent rounding: flash_mla writes the dtype of q."""
    with FakeTensorMode():

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        integers = empty(3, 6, dtype=torch.int32), empty(3, dtype=torch.int32)
        given = (empty(3, 1, 16, 576), empty(5, 64, 1, 576), *integers)
        lse = empty(3, 16, 1, dtype=torch.float32)

        def call(backend, dtype):
            out = empty(3, 1, 16, 512, dtype=dtype)
            mla_decode(*given, softmax_scale=0.1, backend=backend, out=out, lse=lse)

        with pytest.raises(BackendUnavailableError, match=CANNOT.format("flash_mla")) as caught:
            call("flash_mla", torch.float32)
        assert "writes torch.bfloat16 like q, out is torch.float32" in str(caught.value)
        for backend, dtype in (("auto", torch.float32), ("flash_mla", torch.bfloat16)):
            call(backend, dtype)


def test_the_cpu_backend_is_refused_for_cuda_tensors():
    with FakeTensorMode():
        given = arguments("cuda")
        with pytest.raises(BackendUnavailableError, match=CANNOT.format("cpu")):
            mla_decode(**given, backend="cpu")
        mla_decode(**given, backend="reference")


@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
def test_backends_that_run_here(backend):
    mla_decode(**arguments(), backend=backend)


def test_the_report_names_every_backend_with_its_reasons():
    report = backend_report(device="cpu")
    assert report.choice == "cpu"
    assert tuple(report.reasons) == BACKENDS
    assert report.reasons["cpu"] == report.reasons["reference"] == ()
    text = str(report)
    assert text.startswith(
        "auto -> cpu\norder      cpu: all that serves cpu beside the reference\n"
    )
    for backend in GPU_BACKENDS:
        assert report.reasons[backend]
        assert f"\n{backend:10} {report.reasons[backend][0]}" in text


@pytest.mark.parametrize(
    ("sizes", "order", "choice"),
    [
        ({}, ("gluon", "triton", "flash_mla"), "gluon"),
        ({"batch_size": 128, "num_heads_q": 128}, ("flash_mla", "gluon", "triton"), "flash_mla"),
        ({"batch_size": 32, "num_heads_q": 8, "max_seq_len": 512}, None, "gluon"),
    ],
)
def test_the_report_says_why_where_every_backend_runs(monkeypatch, sizes, order, choice):
    """Symptom: "auto -> gluon" and "runs" three times, without a word about the choice."""
    monkeypatch.setattr(_selection, "reasons_against", lambda *args, **options: [])
    report = backend_report(device="cuda", **sizes)
    assert report.choice == report.order[0] == choice
    assert order is None or report.order == order
    rows, batch = sizes.get("num_heads_q", 16), sizes.get("batch_size", 1)
    width = sizes.get("max_seq_len", 4096)
    assert (
        f"\norder      {', '.join(report.order)}: fastest first on an H200 with S * H = {rows} "
        f"query rows, batch {batch} and a block table {width} tokens wide\n"
    ) in str(report)


def shapes(device):
    values = itertools.product(
        *(LATENT_ROPE_PAIRS, (1, 63, 128), (1, 8), (1, 64), (torch.bfloat16, torch.float64))
    )
    for (latent, rope), heads, seqlen_q, page_size, dtype in values:
        yield DecodeShape(
            *(torch.device(device), dtype, dtype, 2, seqlen_q, heads, latent + rope, latent),
            *(9, page_size, 4, page_size * (latent + rope), latent + rope),
        )


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_auto_never_picks_what_cannot_run(device):
    for shape in shapes(device):
        chosen = select("mla_decode", "auto", shape)
        assert reasons_against(chosen, shape) == []
        assert select("mla_decode", chosen, shape) == chosen


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_devices_without_kernels_have_the_reference(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has the kernels")
    for op in ("mla_metadata_out", "append_kv_", "merge_states"):
        function = device_kernel(op, torch.device(device))
        assert function.__module__ == "mla_ops.backends.reference"


def sweep():
    """Yield the measured shapes with us by backend, FlashMLA with the better schedule."""
    path = Path(__file__).parents[2] / "scripts" / "results" / "decode_sweep_h200.json"
    for result in json.loads(path.read_text())["results"]:
        times = dict(result["us"])
        times["flash_mla"] = min(times["flash_mla"], times.pop("FM"))
        yield StepShape(result["b"], result["h"], result["k"]), times


@pytest.mark.parametrize("without", [(), ("gluon",)], ids=["all", "without_gluon"])
def test_choice_fits_the_committed_sweep(without):
    lost = []
    for step, times in sweep():
        shape = step.decode_shape(torch.device("cuda"), torch.bfloat16)
        present = {name: us for name, us in times.items() if name not in ("auto", *without)}
        choice = next(name for name in _preferences(shape) if name in present)
        lost.append(min(present.values()) / present[choice])
    assert len(lost) == 200
    assert min(lost) >= 0.97


def test_auto_is_as_fast_as_the_best_of_the_committed_table():
    """What auto ran, not what its table says: its own run differs from the backend's."""
    path = Path(__file__).parents[2] / "scripts" / "results" / "decode_h200.json"
    results = json.loads(path.read_text())["results"]
    assert len(results) == 16
    for result in results:
        auto = result["us"].pop("auto")
        assert min(result["us"].values()) >= 0.97 * auto, result


@pytest.mark.parametrize("name", ["page_size", "max_seq_len"])
def test_report_refuses_a_size_without_meaning(name):
    with pytest.raises(ValueError, match=f"backend_report: {name} must be positive, got 0"):
        backend_report(**{name: 0})
