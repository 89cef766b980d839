"""Captures by hand: streams, caches that alternate, resets, and modes of autograd."""

import hopper
import pytest
import torch

from mla_ops.ops import decode

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BATCH, MAX_LEN = 6, 512


def pair(seed=0, **options):
    """Return a model, its eager twin and inputs."""
    model, twin = (hopper.Layers(3, BATCH, MAX_LEN, **options) for _ in range(2))
    for each in (model, twin):
        each.shuffle_pages(seed)
        each.set_lengths([0, 1, 63, 64, 200, 300])
    tokens = model.tokens()
    hopper.renew(tokens, seed)
    return model, twin, tokens


@pytest.mark.parametrize("backend", ["flash_mla", "triton"])
@pytest.mark.parametrize("side", [False, True], ids=["own_stream", "side_stream"])
def test_capture(backend, side):
    model, twin, tokens = pair(backend=backend)
    stream = torch.cuda.Stream() if side else None
    graph, result = hopper.captured(model, tokens, stream=stream)
    # Recording runs nothing: lengths are still those of before.
    assert torch.equal(model.cache.cache_seqlens, twin.cache.cache_seqlens)
    for step in range(10):
        hopper.renew(tokens, step)
        if side:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            graph.replay()
        expected = twin(*tokens)
        hopper.assert_same_bits(result, expected)
    twin.check_against_oracle(tokens[0], *expected)


def test_eager_calls_on_a_side_stream_run_there(flash_mla):
    """A kernel launched on another stream would read the inputs before they are written."""
    model, twin, tokens = pair(backend=flash_mla)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        hopper.renew(tokens, 5)
        result = model(*tokens)
    torch.cuda.current_stream().wait_stream(stream)
    hopper.assert_same_bits(result, twin(*tokens))


@pytest.mark.parametrize("backend", ["flash_mla", "triton"])
def test_two_caches_alternate(backend):
    runs = []
    for seed in (1, 2):
        model, twin, tokens = pair(seed, backend=backend)
        graph, result = hopper.captured(model, tokens)
        runs.append((model, twin, tokens, graph, result))
    for step in range(200):
        model, twin, tokens, graph, result = runs[step % 2]
        hopper.renew(tokens, step)
        if step % 31 == 0:
            for each in (model, twin):
                each.set_lengths([step % 97, 0, 64, 65, 1, 449], live=3 + step % 4)
        graph.replay()
        hopper.assert_same_bits(result, twin(*tokens))


def test_two_graphs_on_two_streams(flash_mla):
    runs = []
    for seed in (1, 2):
        model, twin, tokens = pair(seed, backend=flash_mla)
        graph, result = hopper.captured(model, tokens)
        # A graph holds addresses, not tensors: the model must outlive it.
        runs.append((model, twin, tokens, graph, result, torch.cuda.Stream()))
    for step in range(30):
        for _, _, tokens, *_ in runs:
            hopper.renew(tokens, step)
        for *_, graph, _, stream in runs:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        for *_, stream in runs:
            torch.cuda.current_stream().wait_stream(stream)
        for _, twin, tokens, _, result, _ in runs:
            hopper.assert_same_bits(result, twin(*tokens))


def test_reset_keeps_addresses_and_the_graph(flash_mla):
    model, twin, tokens = pair(backend=flash_mla)
    addresses = model.addresses()
    graph, result = hopper.captured(model, tokens)
    for round_ in range(3):
        for each in (model, twin):
            each.cache.reset()
            assert not each.cache.cache_seqlens.any()
        assert model.addresses() == addresses
        hopper.renew(tokens, round_)
        graph.replay()
        hopper.assert_same_bits(result, twin(*tokens))
        assert (result[0] == 0).all(), "rows without pages are padded rows"
        assert (result[1] == -torch.inf).all()
        for each in (model, twin):
            for row in range(0, BATCH, 1 + round_):
                each.cache.allocate(row, 70 + row)
        for step in range(80):
            hopper.renew(tokens, step)
            graph.replay()
            expected = twin(*tokens)
        hopper.assert_same_bits(result, expected)
        # Live rows grew with the steps since the reset.
        assert int(model.cache.cache_seqlens.max()) == 80


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_modes_of_autograd_may_alternate(flash_mla, seqlen_q):
    """Symptom: caches made or first used in one mode cannot be updated in another."""
    model, twin, tokens = pair(backend=flash_mla, seqlen_q=seqlen_q)
    step_of = hopper.compiled(model)
    modes = (torch.no_grad, torch.inference_mode, torch.inference_mode, torch.no_grad)
    for step in range(16):
        hopper.renew(tokens, step)
        with modes[step % 4]():
            torch.compiler.cudagraph_mark_step_begin()
            result = tuple(tensor.clone() for tensor in step_of(*tokens))
        with modes[(step + 1) % 4]():
            hopper.assert_same_bits(result, twin(*tokens))
    graph, recorded = hopper.captured(model, tokens)
    with torch.inference_mode():
        graph.replay()
        hopper.assert_same_bits(recorded, twin(*tokens))


def test_grad_mode_runs_and_equals(flash_mla):
    model, twin, tokens = pair(backend=flash_mla)
    with torch.enable_grad():
        result = model(*tokens)
    hopper.assert_same_bits(result, twin(*tokens))
    with torch.enable_grad(), pytest.raises(RuntimeError, match="inference only"):
        model(tokens[0].requires_grad_(), *tokens[1:])


def test_allocate_is_refused_inside_a_capture(flash_mla):
    model, _, _ = pair(backend=flash_mla)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="a CUDA graph capture"):
        model.cache.allocate(0, 1)


def test_debug_check_names_stale_metadata_and_is_silent_in_a_capture(flash_mla, monkeypatch):
    monkeypatch.setattr(decode, "CHECK_METADATA", True)
    model, _, tokens = pair(backend=flash_mla)
    model(*tokens)
    graph, _ = hopper.captured(model, tokens)
    graph.replay()
    cache = model.cache
    stale = model.schedule.update(cache.cache_seqlens)
    cache.cache_seqlens[4] += 100
    with pytest.raises(ValueError, match="schedule of the present cache_seqlens"):
        decode.mla_decode(
            *(tokens[0], cache.kv_cache(0), cache.block_table, cache.cache_seqlens, stale),
            softmax_scale=hopper.SCALE,
        )
