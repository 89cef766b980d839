"""Eager-equal, or refused by name: every holder, static and dynamic, by every compiler."""

import pytest
import torch
from holders import HOLDERS, state
from pools import HEAD_DIM, make_pool, make_tokens

import mla_ops

BACKENDS = ["aot_eager", "inductor"]


def run(holder, backend, dynamic, batches=(3, 2)):
    """Run a few batches eagerly and compiled on separate memory; return the two traces."""
    pool = make_pool()
    ours, theirs = holder.prepare(pool.clone()), holder.prepare(pool.clone())
    torch._dynamo.reset()
    compiled = torch.compile(holder.step, backend=backend, fullgraph=True, dynamic=dynamic)
    traces = []
    # A cached graph of an earlier version would hide what this one does.
    with torch.inference_mode(), torch._inductor.config.patch(force_disable_caches=True):
        for batch in batches if dynamic else batches[:1]:
            tokens = make_tokens(3, seed=batch)
            tokens = type(tokens)(*(tensor[:batch] for tensor in tokens))
            for held, step, trace in ((ours, compiled, []), (theirs, holder.step, [])):
                trace.extend(tensor.clone() for tensor in step(held, tokens))
                trace.extend(tensor.clone() for tensor in state(held))
                traces.append(trace)
    return traces[0::2], traces[1::2]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.name)
def test_equals_eager_or_is_refused_by_name(holder, backend, dynamic):
    if holder.name == "outputs_in_one_buffer" and dynamic:
        pytest.skip("its buffer is of a fixed batch")
    try:
        ours, theirs = run(holder, backend, dynamic)
    except Exception as error:
        text = str(error)
        assert not holder.must, text
        assert "append_kv_: " in text or "mla_decode: " in text, text
        assert "must be" in text, text
        return
    for mine, eager in zip(ours, theirs, strict=True):
        for got, expected in zip(mine, eager, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_view_of_an_input_that_begins_inside_its_storage_is_refused(backend, mode):
    """Symptom: the write landed as far behind its place as the input lies in its storage."""
    memory = torch.zeros(12, 4, 1, HEAD_DIM)
    tokens = make_tokens(2)

    def step(pool):
        mla_ops.append_kv_(pool[:3], tokens.kv_c, tokens.k_pe, tokens.slots)

    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        mode(),
        pytest.raises(Exception, match="append_kv_: kv_cache must be a whole input or a view"),
    ):
        torch.compile(step, backend=backend, fullgraph=True)(memory[4:10])
    assert not memory.any()
