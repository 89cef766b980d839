"""The measuring code that bench and the scripts share: sizes, checks, clocks, modes."""

import math
import time

import pytest
import torch

from mla_ops.cli import bench_timing
from mla_ops.cli.bench_modes import NotCapturedError, prepare
from mla_ops.cli.bench_step import DecodeStep, StepShape
from mla_ops.cli.bench_timing import Ceilings, ceilings, measure_us, pools_needed

CPU = torch.device("cpu")


def step(dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    shape = StepShape(**{"batch_size": 3, "num_heads_q": 2, "length": 70, **sizes})
    return DecodeStep(shape, num_pools=2, device=CPU, dtype=dtype)


def test_sizes_of_a_decode():
    shape = StepShape(4, 16, 1000, head_dim=288, head_dim_v=256, seqlen_q=2)
    assert shape.pages == 16
    assert shape.moved_bytes(torch.bfloat16) == 4 * 1000 * 288 * 2
    assert shape.operations == 2 * (4 * 2 * 16) * 1000 * (288 + 256)
    seen = shape.decode_shape(CPU, torch.bfloat16)
    made = DecodeStep(shape, num_pools=1, device=CPU, dtype=torch.bfloat16)
    pages, page_size, _, head_dim = made.kv[0].shape
    assert (seen.num_pages, seen.page_size, seen.head_dim) == (pages, page_size, head_dim)
    assert (seen.page_stride, seen.row_stride) == (made.kv[0].stride(0), made.kv[0].stride(1))
    assert (seen.batch_size, seen.seqlen_q, seen.num_heads_q) == made.q.shape[:3]
    assert seen.max_pages == made.table.shape[1]


def test_roof_is_the_slower_of_memory_and_products():
    peak = Ceilings(bandwidth_gb_s=1000.0, matrix_tflop_s=100.0)
    assert peak.roof_us(2_000_000_000, 10) == 2000.0
    assert peak.roof_us(10, 3 * 10**11) == 3000.0


@pytest.mark.parametrize(
    ("size", "pools"), [(0, 64), (1 << 20, 64), (30 << 20, 6), (100 << 20, 2), (1 << 40, 2)]
)
def test_pools_together_exceed_l2(size, pools):
    assert pools_needed(size) == pools


def test_error_sees_a_wrong_key_and_a_wrong_lse():
    made = step()
    pool = made.kv[0]
    out, lse = made.decode(pool, "cpu")
    assert made.error(pool, out, lse) < 1e-5
    assert made.error(made.kv[1], out) > 0.1
    assert made.error(pool, out, lse + 0.1) == math.inf
    assert made.error(pool, out, torch.full_like(lse, torch.nan)) == math.inf
    assert not made.error(pool, torch.full_like(out, torch.nan)) <= 1e-5


def test_a_step_decodes_every_pool_into_outputs_of_the_caller_too():
    made = step(dtype=torch.bfloat16)
    made.backend = "cpu"
    outs = made()
    assert len(outs) == 2
    assert not torch.equal(*outs)
    out, lse = torch.empty_like(outs[1]), torch.empty(3, 1, 2).transpose(1, 2)
    made.decode(made.kv[1], "cpu", out, lse)
    assert torch.equal(out, outs[1])


def test_modes_return_the_outputs_of_the_step():
    made = step()
    made.backend = "cpu"
    with torch.inference_mode():
        for mode in ("eager", "compile"):
            run = prepare(made, mode)
            assert all(map(torch.equal, run(), made()))


def test_every_shape_is_compiled_however_many_there_are():
    """Symptom: from the ninth shape on, torch refused to compile the same step once more."""
    for heads in range(1, 12):
        made = step(num_heads_q=heads, batch_size=1, length=1)
        made.backend = "cpu"
        with torch.inference_mode():
            prepare(made, "compile")


def test_cuda_graphs_that_were_not_recorded_are_refused():
    """On the CPU torch drops them without a word: a time would be that of plain compile."""
    made = step()
    with torch.inference_mode(), pytest.raises(NotCapturedError, match="0 recordings"):
        prepare(made, "reduce-overhead")


def test_the_clock_of_the_cpu(monkeypatch):
    monkeypatch.setattr(bench_timing, "MIN_SECONDS", 0.05)
    us, spread = measure_us(lambda: time.sleep(0.004), CPU)
    assert 4000 <= us < 40000
    assert spread >= 0


def test_ceilings_of_the_cpu_are_reached_and_finite(monkeypatch):
    monkeypatch.setattr(bench_timing, "MAX_SECONDS", 0.2)
    peak = ceilings(CPU, torch.bfloat16)
    assert 0.1 < peak.bandwidth_gb_s < 10_000
    assert 1e-4 < peak.matrix_tflop_s < 1000


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "hand-graph"])
def test_a_replay_reads_what_the_pools_hold_now(mode):
    """A graph over other memory than the step's would pass the check and time something else."""
    shape = StepShape(2, 16, 300)
    made = DecodeStep(shape, num_pools=3, device=torch.device("cuda"), dtype=torch.bfloat16)
    with torch.inference_mode():
        run = prepare(made, mode)
        made.kv.copy_(made.kv.flip(0))
        outs = run()
        for pool, out in zip(made.kv, outs, strict=True):
            assert made.error(pool, out) < 5e-3


@pytest.mark.gpu
def test_ceilings_of_a_gpu_are_plausible():
    peak = ceilings(torch.device("cuda"))
    assert 100 < peak.bandwidth_gb_s < 20_000
    assert 10 < peak.matrix_tflop_s < 10_000
