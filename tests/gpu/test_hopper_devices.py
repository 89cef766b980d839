"""Tensors on another device than the current one."""

import hopper
import pytest
import torch

import mla_ops
from mla_ops.testing.inputs import make_decode_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.multi_gpu]


@pytest.fixture(autouse=True)
def current_is_zero():
    with torch.cuda.device(0):
        yield
        assert torch.cuda.current_device() == 0, "an operator left the device changed"


def run(device, backend):
    inputs = make_decode_inputs((0, 1, 65, 700), softmax_scale=hopper.SCALE, device=device)
    lengths = inputs.cache_seqlens
    slots = torch.tensor([-1, 64, 7], device=device)
    pool = torch.zeros((4, 64, 1, 576), dtype=torch.bfloat16, device=device)
    tokens = torch.ones((3, 576), dtype=torch.bfloat16, device=device)
    mla_ops.append_kv_(pool, tokens[:, :512], tokens[:, 512:], slots)
    assert int(pool.count_nonzero()) == 2 * 576
    buffers = mla_ops.MLAMetadataBuffers(8, num_heads_q=16, device=device)
    metadata = buffers.update(lengths)
    result = mla_ops.mla_decode(
        *(*inputs[:4], metadata), softmax_scale=hopper.SCALE, backend=backend
    )
    out, lse = torch.empty_like(result.out), torch.empty_like(result.lse)
    mla_ops.mla_decode(
        *(*inputs[:4], metadata),
        softmax_scale=hopper.SCALE,
        backend=backend,
        out=out,
        lse=lse,
    )
    hopper.assert_same_bits((out, lse), result)
    merged = mla_ops.merge_states(result.out[None], result.lse[None])
    assert merged.out.device == torch.device(device)
    hopper.check(*inputs[:4], *result)
    return result


@pytest.mark.parametrize("backend", ["flash_mla", "triton", "auto"])
def test_on_another_device(backend):
    there = run("cuda:1", backend)
    here = run("cuda:0", backend)
    hopper.assert_same_bits([tensor.to("cuda:0") for tensor in there], here)


@pytest.mark.parametrize("backend", ["flash_mla", "triton"])
def test_the_stream_is_the_other_devices_current_one(backend):
    inputs = make_decode_inputs((1, 65, 700), softmax_scale=hopper.SCALE, device="cuda:1")
    q = torch.zeros_like(inputs.q)
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device(1), torch.cuda.stream(stream), torch.cuda.device(0):
        with torch.cuda.device(1):
            torch.cuda._sleep(50_000_000)
            q.copy_(inputs.q)
        out, lse = mla_ops.mla_decode(
            *(q, *inputs[1:4]), softmax_scale=hopper.SCALE, backend=backend
        )
    torch.cuda.synchronize("cuda:1")
    hopper.check(*inputs[:4], out, lse)


def test_mixed_devices_are_refused():
    inputs = make_decode_inputs((1, 65), device="cuda:1")
    for name in ("q", "kv_cache", "block_table", "cache_seqlens"):
        moved = inputs._replace(**{name: getattr(inputs, name).to("cuda:0")})
        with pytest.raises(ValueError, match="must be on cuda"):
            mla_ops.mla_decode(*moved[:4], softmax_scale=0.1)
    lengths = inputs.cache_seqlens
    buffers = mla_ops.MLAMetadataBuffers(2, num_heads_q=16, device="cuda:0")
    with pytest.raises(ValueError, match="must be on cuda:1"):
        buffers.update(lengths)


def test_a_captured_step_on_another_device():
    with torch.cuda.device(1):
        model, twin = (hopper.Layers(2, 3, 256) for _ in range(2))
        for each in (model, twin):
            each.set_lengths([0, 64, 100])
        tokens = model.tokens()
        hopper.renew(tokens, 0)
        graph, result = hopper.captured(model, tokens)
    graph.replay()
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device(1):
        hopper.assert_same_bits(result, twin(*tokens))
