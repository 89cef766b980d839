"""First calls in a fresh process; run as ``python fresh_process.py <case>``, prints OK."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import hopper


def first_call_under_capture(backend):
    """Nothing ran before: no import, no JIT compilation, no allocation of ours."""
    model = hopper.Layers(2, 4, 256, backend=backend)
    model.set_lengths([0, 63, 64, 200])
    tokens = model.tokens()
    hopper.renew(tokens, 0)
    graph, result = hopper.captured(model, tokens)
    for step in range(3):
        hopper.renew(tokens, step)
        graph.replay()
        model.check_against_oracle(tokens[0], *result)


def first_capture_after_warmup(backend):
    """warmup has compiled every kernel of ours: neither the capture nor a replay compiles one."""
    from triton import knobs

    import mla_ops

    mla_ops.warmup(num_heads_q=16, batch_sizes=(4,), max_seq_len=256, backend=backend)
    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **seen: compiled.append(seen["repr"])
    first_call_under_capture(backend)
    assert not compiled, compiled


def first_call_compiled(backend):
    from mla_ops.diagnostics import measuring

    model = hopper.Layers(2, 4, 256, backend=backend)
    model.set_lengths([0, 63, 64, 200])
    tokens = model.tokens()
    with hopper.cudagraph_or_error(), measuring() as recorder:
        step_of = hopper.compiled(model)
        for step in range(5):
            hopper.renew(tokens, step)
            torch.compiler.cudagraph_mark_step_begin()
            result = step_of(*tokens)
            model.check_against_oracle(tokens[0], *result)
        seen = recorder.result()
    assert (seen.graphs, seen.recordings, seen.skips) == (1, 1, 0), seen.describe()


def first_call_in_inference_mode(backend):
    """Caches built in inference mode, too, unlike everywhere else."""
    with torch.inference_mode():
        first_call_under_capture(backend)


if __name__ == "__main__":
    with torch.no_grad():
        globals()[sys.argv[1]](sys.argv[2])
    print("OK")
