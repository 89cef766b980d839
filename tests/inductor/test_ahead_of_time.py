"""torch.export and AOTInductor: a step compiled ahead of time equals eager, results and memory."""

import pytest
import torch
from holders import Buffers
from pools import LATENT, Tokens, attend, make_pool, make_tokens
from torch import nn

from mla_ops import MLAMetadataBuffers, append_kv_, mla_decode
from mla_ops._torch_compile import caches_off

CAPACITY = 4


class LayersOfOnePool(nn.Module):
    """Layers selected inside, plan and results in fixed buffers, a clone that is written too."""

    def __init__(self):
        super().__init__()
        self.plan = MLAMetadataBuffers(CAPACITY, num_heads_q=2)

    def forward(self, tokens, pool, out, lse):
        tokens, results = Tokens(*tokens), []
        batch = tokens.q.shape[0]
        for kv in pool.unbind(0):
            append_kv_(kv, tokens.kv_c, tokens.k_pe, tokens.slots)
            state = mla_decode(
                *(tokens.q, kv, tokens.table, tokens.lengths, self.plan.update(tokens.lengths)),
                softmax_scale=0.1,
                head_dim_v=LATENT,
                out=out[:batch],
                lse=lse[:batch],
            )
            results.append(state.out + 0)
            older = kv.clone()
            append_kv_(kv, tokens.kv_c * 2, tokens.k_pe, tokens.slots)
            append_kv_(older, tokens.kv_c * 3, tokens.k_pe, tokens.other_slots)
            results += [older, attend(older, tokens), attend(kv, tokens)]
        return tuple(results)


class PoolsInBuffers(nn.Module):
    """The pools are the model's own: AOTInductor's package has copies, and keeps them."""

    def __init__(self):
        super().__init__()
        self.layers = Buffers(make_pool())

    def forward(self, tokens):
        return self.layers(Tokens(*tokens))


def no_memory():
    return ()


def pool_and_outputs():
    return make_pool(), torch.zeros(CAPACITY, 1, 2, LATENT), torch.zeros(CAPACITY, 2, 1)


@pytest.mark.parametrize(
    ("model", "memory", "dynamic"),
    [
        pytest.param(LayersOfOnePool, pool_and_outputs, False, id="layers_of_one_pool-static"),
        pytest.param(LayersOfOnePool, pool_and_outputs, True, id="layers_of_one_pool-dynamic"),
        pytest.param(PoolsInBuffers, no_memory, True, id="pools_in_buffers-dynamic"),
    ],
)
def test_a_compiled_package_equals_eager(model, memory, dynamic, tmp_path):
    """Several calls: what the package writes, its own buffers too, is there at the next one."""
    tokens, ours, theirs = tuple(make_tokens()), memory(), memory()
    batch = torch.export.Dim("batch", min=2, max=CAPACITY)
    shapes = (tuple({0: batch} for _ in tokens), *(None for _ in ours)) if dynamic else None
    eager = model()
    with torch.no_grad(), caches_off():
        program = torch.export.export(model(), (tokens, *memory()), dynamic_shapes=shapes)
        path = str(tmp_path / "step.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        compiled = torch._inductor.aoti_load_package(path)
        for seed, count in enumerate((3, 3, 2 if dynamic else 3)):
            tokens = tuple(make_tokens(count, seed))
            got, expected = compiled(tokens, *ours), eager(tokens, *theirs)
            torch.testing.assert_close([*got, *ours], [*expected, *theirs], rtol=1e-5, atol=1e-5)
