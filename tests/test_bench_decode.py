"""scripts/bench_decode.py on the CPU: no number of a wrong result, whichever column it is in."""

from types import SimpleNamespace

import bench_decode
import pytest
import torch
from bench_decode import Inputs

from mla_ops import mla_decode
from mla_ops.cli import bench_timing
from mla_ops.cli.bench_step import StepShape
from mla_ops.cli.bench_timing import pools_needed

SHAPE = (8, 3, 70)


class Graph:
    """What replays, where there are no CUDA graphs: the calls again, into the same memory."""

    def __init__(self, launches):
        self.launches = launches
        self.kept = [launch() for launch in launches]

    def replay(self):
        for launch, result in zip(self.launches, self.kept, strict=True):
            for tensor, value in zip(result, launch(), strict=True):
                tensor.copy_(value)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Calls in place of graphs, a constant for a clock, three pools, a FlashMLA of our own."""

    def capture(launches):
        graph = Graph(launches)
        return graph, graph.kept

    refuses = Inputs.refuses
    monkeypatch.setattr(bench_timing, "capture", capture)
    monkeypatch.setattr(bench_timing, "_event_us", lambda run: run() or 6.0)
    monkeypatch.setattr(bench_decode, "pools_needed", lambda moved: 3)
    monkeypatch.setattr(
        Inputs,
        "refuses",
        lambda inputs, name: [] if name == "flash_mla" else refuses(inputs, name),
    )
    flash_mla = SimpleNamespace(
        get_mla_decoding_metadata=lambda lengths, *_: (lengths, lengths), dense_decode_fwd=dense
    )
    monkeypatch.setattr(torch.ops, "flash_mla_legacy", flash_mla, raising=False)


def dense(q, pool, head_dim_v, lengths, table, scale, causal, meta, splits):
    """Answer as FlashMLA's own kernel, with more than out and lse."""
    out, lse = mla_decode(q, pool, table, lengths, softmax_scale=scale, causal=causal)
    return out, lse, None


def test_right_results_have_times():
    times = bench_decode.measure(SHAPE, ["cpu", "triton", "auto"], "cpu")
    assert times == {"FM": 2.0, "cpu": 2.0, "auto": 2.0}


def test_each_backend_has_its_own_time(monkeypatch):
    us = {"FM": 3.0, "cpu": 6.0, "auto": 9.0}
    clock = {}
    launches = Inputs.launches

    def noted(inputs, name):
        found = launches(inputs, name)
        clock[id(found)] = us[name]
        return found

    monkeypatch.setattr(Inputs, "launches", noted)
    monkeypatch.setattr(
        bench_timing, "_event_us", lambda run: run() or clock[id(run.__self__.launches)]
    )
    times = bench_decode.measure(SHAPE, ["cpu", "auto"], "cpu")
    assert times == {"FM": 1.0, "cpu": 2.0, "auto": 3.0}


def test_several_queries_are_timed_too():
    shape = (2, 3, 70, 4)
    assert bench_decode.Inputs(shape, "cpu").q.shape == (2, 4, 3, 576)
    times = bench_decode.measure(shape, ["cpu"], "cpu")
    assert "(2, 3, 70, 4)" in bench_decode.row(shape, times, bench_timing.Ceilings(4000, 700))


def of_sequences(inputs, pool, out, lse):
    out[2:] = 0


def of_the_middle_pool(inputs, pool, out, lse):
    if pool.data_ptr() == inputs.kv[1].data_ptr():
        out.zero_()


def of_lse(inputs, pool, out, lse):
    lse.add_(1)


@pytest.mark.parametrize("wrong", [of_sequences, of_the_middle_pool, of_lse])
@pytest.mark.parametrize("name", ["auto", "FM"])
def test_a_wrong_part_ends_the_run(name, wrong, monkeypatch):
    """Symptom: two sequences of the first pool were compared, FlashMLA's column not at all."""
    launches = Inputs.launches

    def wrong_launches(inputs, backend):
        def call(pool, right):
            out, lse = right()
            wrong(inputs, pool, out, lse)
            return out, lse

        right = launches(inputs, backend)
        if backend != name:
            return right
        pools = zip(inputs.kv, right, strict=True)
        return [lambda pool=pool, one=one: call(pool, one) for pool, one in pools]

    monkeypatch.setattr(Inputs, "launches", wrong_launches)
    with pytest.raises(SystemExit, match=rf"^{name} \(8, 3, 70\): .* of 3; no time is printed"):
        bench_decode.measure(SHAPE, ["auto"], "cpu")


def test_a_graph_that_writes_nothing_ends_the_run(monkeypatch):
    """The call is right and its graph is not: what is timed is what must be checked."""
    monkeypatch.setattr(Graph, "replay", lambda graph: None)
    with pytest.raises(SystemExit, match="relative error nan, budget 5e-03, in pool 1 of 3"):
        bench_decode.measure(SHAPE, ["auto"], "cpu")


def test_the_sweep_covers_the_largest_shapes_within_60_gb():
    """Symptom: 64 and 128 sequences of 131,072 tokens were left out, where auto was a guess."""
    shapes = bench_decode.sweep_shapes()
    assert len(shapes) == 200
    assert {(64, 128, 131072), (128, 8, 131072)} <= set(shapes)
    sizes = [StepShape(*shape).moved_bytes(torch.bfloat16) for shape in shapes]
    assert all(pools_needed(size) * size <= 60e9 for size in sizes)
    assert "auto" in bench_decode.BACKENDS.split(",")
