"""The measuring code that bench and the scripts share: sizes, checks, clocks, modes."""

import time

import pytest
import torch

from mla_ops.cli import bench_check, bench_timing
from mla_ops.cli.bench_check import Oracle
from mla_ops.cli.bench_modes import NotCapturedError, prepare
from mla_ops.cli.bench_step import DecodeStep, StepShape
from mla_ops.cli.bench_timing import Ceilings, ceilings, measure_us, pools_needed
from mla_ops.ops.decode import MLAOutput

CPU = torch.device("cpu")


def step(dtype=torch.float32, num_pools=2, **sizes):
    torch.manual_seed(0)
    shape = StepShape(**{"batch_size": 3, "num_heads_q": 2, "length": 70, **sizes})
    return DecodeStep(shape, num_pools=num_pools, device=CPU, dtype=dtype)


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
    ("size", "pools"),
    [(0, 64), (1 << 20, 64), (30 << 20, 6), (100 << 20, 2), (20 * 10**9, 2), (31 * 10**9, 1)],
)
def test_pools_together_exceed_l2_and_not_60_gb(size, pools):
    assert pools_needed(size) == pools


def outputs(made, backend="cpu"):
    """Return the results of a step that tests may change."""
    made.backend = backend
    return [MLAOutput(out.clone(), lse.clone()) for out, lse in made()]


def test_the_oracle_accepts_every_backend_and_dtype():
    for dtype, budget in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        made = step(dtype, seqlen_q=2)
        for backend in ("cpu", "reference"):
            error, problem = Oracle(made).verdict(outputs(made, backend))
            assert problem is None
            assert 0 < error < budget


@pytest.mark.parametrize("pool", [0, 1, 2])
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_the_oracle_sees_any_sequence_of_any_pool(sequence, pool):
    """Symptom: with two sequences and the outer pools compared, zeros elsewhere got a time."""
    made = step(num_pools=3)
    oracle = Oracle(made)
    results = outputs(made)
    results[pool].out[sequence] = 0
    error, problem = oracle.verdict(results)
    assert 0.2 < error < 0.9
    assert problem.endswith(f", budget 1e-05, in pool {pool + 1} of 3")
    results = outputs(made)
    results[pool].lse[sequence, 1] += 0.1
    problem = oracle.verdict(results).problem
    assert problem == f"lse off by 1.0e-01, budget 1e-03, in pool {pool + 1} of 3"


def test_the_oracle_sees_one_head_among_many():
    """One wrong row among 2048 is lost in the error of their pool."""
    made = step(torch.bfloat16, batch_size=64, num_heads_q=32)
    results = outputs(made)
    results[1].out[17, 0, 9] *= 1.1
    error, problem = Oracle(made).verdict(results)
    assert error < 5e-3
    assert problem == "relative error 1.0e-01, budget 8e-02, in a row of pool 2 of 2"


@pytest.mark.parametrize("name", ["out", "lse"])
def test_the_oracle_refuses_what_is_no_number_and_other_sizes(name):
    made = step()
    oracle, results = Oracle(made), outputs(made)
    for value in (getattr(results[1], name) * torch.nan, getattr(results[1], name)[:1]):
        problem = oracle.verdict([results[0], results[1]._replace(**{name: value})]).problem
        assert problem.endswith("in pool 2 of 2")
        assert " nan, " in problem
    assert oracle.verdict(results[:1]).problem == "1 results of 2 pools"


def test_the_oracle_takes_long_sequences_apart(monkeypatch):
    made = step()
    monkeypatch.setattr(bench_check, "_TOKENS_AT_ONCE", 256)
    assert Oracle(made).verdict(outputs(made)).problem is None


def test_a_step_decodes_every_pool_into_outputs_of_the_caller_too():
    made = step(dtype=torch.bfloat16)
    made.backend = "cpu"
    results = made()
    assert len(results) == 2
    assert not torch.equal(results[0].out, results[1].out)
    out, lse = torch.empty_like(results[1].out), torch.empty(3, 1, 2).transpose(1, 2)
    made.decode(made.kv[1], "cpu", out, lse)
    assert torch.equal(out, results[1].out)
    assert torch.equal(lse, results[1].lse)


def test_modes_return_the_outputs_of_the_step():
    made = step()
    made.backend = "cpu"
    with torch.inference_mode():
        for mode in ("eager", "compile"):
            for seen, expected in zip(prepare(made, mode)(), made(), strict=True):
                assert all(map(torch.equal, seen, expected))


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
        results = run()
        assert Oracle(made).verdict(results).problem is None


@pytest.mark.gpu
def test_ceilings_of_a_gpu_are_plausible():
    peak = ceilings(torch.device("cuda"))
    assert 100 < peak.bandwidth_gb_s < 20_000
    assert 10 < peak.matrix_tflop_s < 10_000
