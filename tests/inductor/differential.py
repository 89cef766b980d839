"""Running a program of text eager and compiled, over memory held in one of many ways."""

import re
from typing import NamedTuple

import torch
from pools import HEAD_DIM, LATENT, PAGE_SIZE, PAGES, make_pool
from torch import nn

import mla_ops
from mla_ops._torch_compile import caches_off

HEADS, CAPACITY = 2, 4
BATCHES = {False: (3, 3), True: (3, 2)}
REFUSAL = re.compile(
    r"\b(append_kv_|mla_decode|mla_decode_out|mla_metadata|merge_states): .*must be"
)


class Tokens(NamedTuple):
    kv: list
    pe: list
    slots: list
    q: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    out: torch.Tensor  # of capacity
    lse: torch.Tensor


class Program(NamedTuple):
    holder: str
    lines: tuple
    returns: tuple
    dynamic: bool
    inference_mode: bool
    backend: str

    @property
    def source(self):
        unpack = HOLDERS[self.holder][1]
        body = (*unpack, *self.lines, f"return ({''.join(name + ', ' for name in self.returns)})")
        return "def step(held, buffers, t):\n" + "".join(f"    {line}\n" for line in body)

    def __repr__(self):
        return (
            f"\n# holder {self.holder}, dynamic={self.dynamic}, backend={self.backend}, "
            f"inference_mode={self.inference_mode}\n{self.source}"
        )


def make_tokens(batch, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def integers(high, *shape):
        return torch.randint(1, high, shape, generator=generator, dtype=torch.int32)

    # Some slots lie behind the end of a smaller view: they are skipped.
    slots = [torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:batch] for _ in range(2)]
    return Tokens(
        kv=[normal(batch, LATENT) for _ in range(2)],
        pe=[normal(batch, HEAD_DIM - LATENT) for _ in range(2)],
        slots=slots,
        q=normal(batch, 1, HEADS, HEAD_DIM),
        table=integers(PAGES, batch, 3) - 1,
        lengths=integers(3 * PAGE_SIZE, batch),
        out=normal(CAPACITY, 1, HEADS, LATENT),
        lse=normal(CAPACITY, HEADS, 1),
    )


class Module(nn.Module):
    def __init__(self, pools, registered):
        super().__init__()
        if registered:
            for index, pool in enumerate(pools):
                self.register_buffer(f"pool_{index}", pool)
            self.pools = [self.pool_0, self.pool_1]
        else:
            self.pools = list(pools)


def _marked(pool):
    pools = [layer.clone() for layer in pool]
    for layer in pools:
        torch._dynamo.mark_static_address(layer)
    return pools


def _misaligned(pool):
    flat = torch.zeros(pool.numel() + 1)
    flat[1:].copy_(pool.flatten())
    return list(flat[1:].view(pool.shape))


def _padded(pool):
    wide = torch.zeros((len(pool), PAGES, PAGE_SIZE + 1, 1, HEAD_DIM + 8))
    layers = wide[:, :, :PAGE_SIZE, :, :HEAD_DIM]
    layers.copy_(pool)
    return list(layers)


_PAIR = ("c0, c1 = held",)
# Name -> how the memory is made of a stacked pool, and the first lines of the step.
HOLDERS = {
    "module_buffers": (lambda p: Module([x.clone() for x in p], True), ("c0, c1 = held.pools",)),
    "module_attributes": (
        lambda p: Module([x.clone() for x in p], False),
        ("c0, c1 = held.pools",),
    ),
    "per_layer_tensors": (lambda p: [x.clone() for x in p], _PAIR),
    "marked_arguments": (_marked, _PAIR),
    "select_outside": (list, _PAIR),
    "sibling_inputs": (lambda p: [p[0], p.flatten(0, 1)[PAGES // 2 :][:PAGES]], _PAIR),
    "one_pool": (lambda p: p[0].clone(), ("c0 = c1 = held",)),
    "select_inside": (lambda p: p, ("c0, c1 = held[0], held[1]",)),
    "unbind_inside": (lambda p: p, ("c0, c1 = held.unbind(0)",)),
    "narrow_inside": (
        lambda p: p,
        ("c0, c1 = (held.narrow(0, i, 1).squeeze(0) for i in (0, 1))",),
    ),
    "view_of_pages": (lambda p: p.flatten(0, 1), (f"c0, c1 = held[:{PAGES}], held[{PAGES}:]",)),
    "input_with_offset": (lambda p: torch.cat((p[:1], p))[1:], ("c0, c1 = held[0], held[1]",)),
    "misaligned": (_misaligned, _PAIR),
    "padded": (_padded, _PAIR),
    "made_inside": (lambda p: p[0].clone(), ("c0, c1 = torch.zeros_like(held), held",)),
    "expanded": (lambda p: [p[0, :1].clone().expand(PAGES, -1, -1, -1), p[1].clone()], _PAIR),
}


def run_program(program):
    """Run ``program`` both ways on memory of its own.

    Returns:
        None when all it returned and all memory is equal, else what differs; "refused" when
        compiling it ended with one of our messages, or aten refuses it in eager.
    """
    scope = {"torch": torch, **{name: getattr(mla_ops, name) for name in mla_ops.__all__}}
    exec(compile(program.source, "<program>", "exec"), scope)
    eager = scope["step"]
    torch._dynamo.reset()
    compiled = torch.compile(
        eager, backend=program.backend, dynamic=program.dynamic, fullgraph=True
    )
    mode = torch.inference_mode if program.inference_mode else torch.no_grad
    # Graphs are compiled anew; the C++ compiler's objects are kept, or it would take all the time.
    with mode(), caches_off():
        expected, refusal = _trace(program, eager)
        got, error = _trace(program, compiled)
    if error is not None:
        by_name = REFUSAL.search(error) or refusal is not None
        return "refused" if by_name else f"torch: {error}"
    if refusal is not None and not REFUSAL.search(refusal):
        return "refused"
    if refusal is not None:
        return f"eager refuses, compiled does not: {refusal}"
    return _difference(got, expected)


def _trace(program, step):
    """Call ``step`` twice; return every tensor after each call, and the error that ended it."""
    held = HOLDERS[program.holder][0](make_pool())
    buffers = mla_ops.MLAMetadataBuffers(CAPACITY, num_heads_q=HEADS)
    seen, kept = [], []
    try:
        for seed, batch in enumerate(BATCHES[program.dynamic]):
            tokens = make_tokens(batch, seed)
            results = step(held, buffers, tokens)
            memory = held.pools if isinstance(held, Module) else held
            memory = memory if isinstance(memory, list) else [memory]
            everything = {
                **{f"returned {i}": tensor for i, tensor in enumerate(results)},
                **{f"cache {i}": tensor for i, tensor in enumerate(memory)},
                **dict(buffers.named_buffers()),
                "t.lengths": tokens.lengths,
                "t.out": tokens.out,
                "t.lse": tokens.lse,
            }
            seen.append({name: tensor.clone() for name, tensor in everything.items()})
            kept.append(results)
    except Exception as error:
        return seen, f"{type(error).__name__}: {error}"
    # What a call returned must not change at the next one, unless it is a view in eager too.
    seen.append(
        {f"{call}.{i}, later": x for call, xs in enumerate(kept) for i, x in enumerate(xs)}
    )
    return seen, None


def _difference(got, expected):
    for call, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, want in theirs.items():
            have = ours[name]
            if have.shape != want.shape or not torch.allclose(
                have.double(), want.double(), rtol=1e-5, atol=1e-5, equal_nan=True
            ):
                return f"call {call}: {name} differs"
    return None
