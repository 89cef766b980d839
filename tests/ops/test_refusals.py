"""Wrong arguments are refused three times with one text, and nothing is written.

The same function runs on real CPU tensors, on fake CUDA tensors (where the fake must not be weaker
than the kernel) and under torch.compile, always also after a good call.
"""

import re

import pytest
import torch
from refusal_table import REFUSALS
from refusals import FUNCTIONS, MUTATED, good_arguments
from torch._subclasses import FakeTensorMode

IDS = [f"{refusal.op}-{refusal.id}" for refusal in REFUSALS]
each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=IDS)


def wanted(refusal, device="cpu", symbolic=False):
    """Return the pattern of the message up to what was got; sizes may be symbols."""
    text = refusal.message.replace("on cpu", f"on {device}")
    pattern = re.escape(text if ", got " in text else f"{text}, got ")
    return re.sub(r"\b\d+\b", r"[^\n]{1,60}?", pattern) if symbolic else pattern


def bad_arguments(refusal, device="cpu"):
    arguments = good_arguments(refusal.op, device)
    return {**arguments, **refusal.change(arguments)}


def check_refused(refusal, call, errors, arguments, pattern=None):
    before = {
        name: value.clone()
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
    }
    with pytest.raises(errors, match=pattern or wanted(refusal)) as caught:
        call(**arguments)
    for name, value in before.items():
        if not isinstance(value, torch._subclasses.FakeTensor):
            assert torch.equal(arguments[name], value), f"{name} was written"
    return caught.value


def as_told(refusal, error):
    """The message tells what was got and how to mend it, as every message of ours."""
    pattern = r"^[a-z_]+: .+ must be .+, got .+ \(.+\)$"
    return re.match(pattern, str(error), re.DOTALL) is not None


@each_refusal
def test_real_tensors(refusal):
    function = FUNCTIONS[refusal.op]
    error = check_refused(refusal, function, refusal.error, bad_arguments(refusal))
    assert type(error) is refusal.error
    assert as_told(refusal, error)
    function(**good_arguments(refusal.op))
    check_refused(refusal, function, refusal.error, bad_arguments(refusal))


@each_refusal
def test_fake_cuda_tensors(refusal):
    with FakeTensorMode():
        function = FUNCTIONS[refusal.op]
        bad, pattern = bad_arguments(refusal, "cuda"), wanted(refusal, "cuda:0")
        check_refused(refusal, function, refusal.error, bad, pattern)
        function(**good_arguments(refusal.op, "cuda"))
        error = check_refused(refusal, function, refusal.error, bad, pattern)
        assert as_told(refusal, error)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_refusal
def test_compiled(refusal, dynamic):
    """Dynamo wraps the exception; the text survives. The eager backend runs Dynamo's fakes."""
    torch._dynamo.reset()
    compiled = torch.compile(
        FUNCTIONS[refusal.op], fullgraph=True, dynamic=dynamic or None, backend="eager"
    )
    pattern = wanted(refusal, symbolic=dynamic)
    check_refused(refusal, compiled, Exception, bad_arguments(refusal), pattern)
    compiled(**good_arguments(refusal.op))
    # The second size of an argument makes Dynamo take it for dynamic.
    pattern = wanted(refusal, symbolic=True)
    check_refused(refusal, compiled, Exception, bad_arguments(refusal), pattern)


@pytest.mark.parametrize("op", MUTATED)
def test_the_good_call_writes(op):
    """Else "nothing was written" would prove nothing."""
    arguments = good_arguments(op)
    arguments["cache_seqlens" if op != "append_kv_" else "kv_c"].fill_(3)
    for name in MUTATED[op]:
        arguments[name].fill_(7)
    before = {name: arguments[name].clone() for name in MUTATED[op]}
    FUNCTIONS[op](**arguments)
    for name, value in before.items():
        assert not torch.equal(arguments[name], value)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_batch_and_table_width_marked_dynamic(op):
    """One graph for any batch and table: marking them dynamic must not specialise anything."""
    torch._dynamo.reset()
    arguments = good_arguments(op)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in ("kv_cache", "attn_sink"):
            dims = {"block_table": (0, 1), "outs": (1,), "lses": (1,)}.get(name, (0,))
            for dim in dims if name != "tile_scheduler_metadata" else ():
                torch._dynamo.mark_dynamic(value, dim)
    torch.compile(FUNCTIONS[op], fullgraph=True, backend="aot_eager")(**arguments)
