"""Every way to hold a cache and mutate it that we know of; each is a small program over a pool.

A program takes ``pool [L, N, P, 1, D]`` and returns a function without arguments that mutates
memory of the pool and returns tensors. ``must``: has to be captured without a copy of the pool;
otherwise it has to equal eager or be refused with a message that names the operator and the fix.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from pools import HEAD_DIM, LATENT, LAYERS, PAGE_SIZE, PAGES, attend, write_and_read
from torch import Tensor, nn

from mla_ops import append_kv_, mla_decode


class Holder(NamedTuple):
    name: str
    prepare: Callable  # pool -> holder object given to the step
    step: Callable  # (holder, tokens) -> tuple of tensors
    must: bool


class Buffers(nn.Module):
    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.register_buffer("a", pool[0].clone())
        self.register_buffer("b", pool[1].clone())

    def forward(self, tokens):
        return write_and_read((self.a, self.b), tokens)


class Attributes(nn.Module):
    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self.pools = [pool[0].clone(), pool[1].clone()]

    def forward(self, tokens):
        return write_and_read(self.pools, tokens)


def marked(pool: Tensor):
    pools = [layer.clone() for layer in pool]
    for tensor in pools:
        torch._dynamo.mark_static_address(tensor)
    return pools


def two_layers_on_one_pool(pool, tokens):
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    first = attend(pool, tokens)
    append_kv_(pool, tokens.kv_c * 2, tokens.k_pe, tokens.other_slots)
    return first, attend(pool, tokens)


def clone_then_write(copy):
    def step(pool, tokens):
        other = copy(pool)
        append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
        append_kv_(other, tokens.kv_c * 2, tokens.k_pe, tokens.other_slots)
        return other, attend(pool, tokens)

    return step


def write_then_clone(pool, tokens):
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    other = pool.clone()
    append_kv_(other, tokens.kv_c * 2, tokens.k_pe, tokens.other_slots)
    return other, attend(pool, tokens)


def older_value_alive(pool, tokens):
    older = pool[1:3] * 1
    view = pool[1:3]
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    return older, view + 0, attend(pool, tokens)


def snapshot_of_slice(pool, tokens):
    older = pool[:2].clone()
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    return (older,)


def kept_between(keep):
    def step(pool, tokens):
        append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
        older = keep(pool)
        append_kv_(pool, tokens.kv_c * 2, tokens.k_pe, tokens.slots)
        return older, attend(pool, tokens)

    return step


def copied_between(pools, tokens):
    first, second = pools
    append_kv_(second, tokens.kv_c, tokens.k_pe, tokens.slots)
    first.copy_(second)
    append_kv_(second, tokens.kv_c * 2, tokens.k_pe, tokens.slots)
    return (attend(second, tokens),)


def copied_before(pools, tokens):
    first, second = pools
    before = attend(second, tokens)
    first.copy_(second)
    append_kv_(second, tokens.kv_c, tokens.k_pe, tokens.slots)
    return before, attend(first, tokens)


def written_then_moved(move):
    def step(pool, tokens):
        append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
        pool.copy_(move(pool))
        return (attend(pool, tokens),)

    return step


def moved_then_written(pool, tokens):
    pool.copy_(pool.flip(0))
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    return (attend(pool, tokens),)


def sibling_views(pool, tokens):
    front, back = pool[: PAGES // 2], pool[PAGES // 2 :]
    append_kv_(front, tokens.kv_c, tokens.k_pe, tokens.slots)
    append_kv_(back, tokens.kv_c * 2, tokens.k_pe, tokens.slots)
    return (attend(pool, tokens),)


def sibling_inputs(views, tokens):
    front, back = views
    append_kv_(front, tokens.kv_c, tokens.k_pe, tokens.slots)
    append_kv_(back, tokens.kv_c * 2, tokens.k_pe, tokens.slots)
    return attend(front, tokens), attend(back, tokens)


def outputs_in_one_buffer(pool, tokens):
    flat = torch.zeros(3 * 2 * LATENT + 3 * 2, device=pool.device)
    out = flat[: 3 * 2 * LATENT].view(3, 1, 2, LATENT)
    lse = flat[3 * 2 * LATENT :].view(3, 2, 1)
    mla_decode(
        *(tokens.q[:3], pool, tokens.table[:3], tokens.lengths[:3]),
        softmax_scale=0.1,
        head_dim_v=LATENT,
        out=out,
        lse=lse,
    )
    return (flat,)


def select_inside(pool, tokens):
    return write_and_read([pool[layer] for layer in range(LAYERS)], tokens)


def unbind_inside(pool, tokens):
    return write_and_read(pool.unbind(0), tokens)


def narrow_inside(pool, tokens):
    return write_and_read([pool.narrow(0, i, 1).squeeze(0) for i in range(LAYERS)], tokens)


def expanded(pool, tokens):
    append_kv_(pool, tokens.kv_c, tokens.k_pe, tokens.slots)
    return (attend(pool, tokens),)


def one(view):
    return lambda pool: view(pool[0].clone())


def misaligned(pool):
    flat = torch.empty(pool[0].numel() + 1, device=pool.device)
    flat[1:].copy_(pool[0].reshape(-1))
    return flat[1:].view(pool[0].shape)


def written_inside(view):
    return lambda pool, tokens: write_and_read([view(pool)], tokens)


def same(pool):
    return pool


COPIES = {
    "clone": torch.clone,
    "clone_of_slice": lambda x: x[1:].clone(),
    "clone_viewed": lambda x: x.clone()[:],
    "empty_copy": lambda x: torch.empty_like(x).copy_(x),
    "to_copy": lambda x: x.to(x.dtype, copy=True),
    "cat_of_one": lambda x: torch.cat([x]),
    "stack_of_one": lambda x: torch.stack([x])[0],
    "repeat_once": lambda x: x.repeat(1, 1, 1, 1),
    "plus_zero": lambda x: x + 0,
    "padded_by_nothing": lambda x: torch.nn.functional.pad(x, (0, 0)),
}

HOLDERS = [
    Holder("module_buffers", Buffers, lambda module, t: module(t), must=True),
    Holder("module_attributes", Attributes, lambda module, t: module(t), must=True),
    Holder(
        "per_layer_tensors",
        lambda p: [x.clone() for x in p],
        lambda p, t: write_and_read(p, t),
        True,
    ),
    Holder("marked_arguments", marked, lambda p, t: write_and_read(p, t), must=True),
    Holder(
        "view",
        one(same),
        written_inside(lambda x: x.view(PAGES // 2, PAGE_SIZE * 2, 1, HEAD_DIM)),
        must=True,
    ),
    Holder("unsqueeze", one(lambda x: x[:, :, 0]), written_inside(lambda x: x.unsqueeze(2)), True),
    Holder("leading_slice", one(same), written_inside(lambda x: x[:4]), must=True),
    Holder("select_outside", lambda p: list(p.clone()), lambda p, t: write_and_read(p, t), True),
    Holder("input_with_offset", lambda p: p[0].clone()[1:], expanded, must=True),
    Holder(
        "slice_of_input_with_offset",
        lambda p: torch.cat((p[1], p[0]))[PAGES:],
        written_inside(lambda x: x[:4]),
        must=False,
    ),
    Holder(
        "view_of_input_with_offset",
        lambda p: torch.cat((p[1], p[0]))[PAGES:],
        written_inside(lambda x: x.view(PAGES // 2, PAGE_SIZE * 2, 1, HEAD_DIM)),
        must=False,
    ),
    Holder("two_layers_on_one_pool", one(same), two_layers_on_one_pool, must=True),
    Holder("select_inside", torch.clone, select_inside, must=False),
    Holder("unbind_inside", torch.clone, unbind_inside, must=False),
    Holder("narrow_inside", torch.clone, narrow_inside, must=False),
    Holder("sibling_views", one(same), sibling_views, must=False),
    Holder("sibling_inputs", lambda p: p[0].clone().split(PAGES // 2), sibling_inputs, False),
    Holder("outputs_in_one_buffer", one(same), outputs_in_one_buffer, must=False),
    *(
        Holder(name, one(same), clone_then_write(copy), must=False)
        for name, copy in COPIES.items()
    ),
    Holder("write_then_clone", one(same), write_then_clone, must=False),
    Holder("older_value_alive", one(same), older_value_alive, must=False),
    Holder("kept_between_writes", one(same), kept_between(torch.clone), must=False),
    Holder("slice_kept_between_writes", one(same), kept_between(lambda x: x[:2].clone()), False),
    Holder("copied_between_writes", lambda p: list(p.clone()), copied_between, must=False),
    Holder("copied_before_write", lambda p: [x.clone() for x in p], copied_before, must=False),
    Holder("written_then_flipped", one(same), written_then_moved(lambda x: x.flip(0)), False),
    Holder("written_then_rolled", one(same), written_then_moved(lambda x: x.roll(1, 0)), False),
    Holder("moved_then_written", one(same), moved_then_written, must=False),
    Holder("snapshot_of_slice", one(same), snapshot_of_slice, must=False),
    Holder("expanded", lambda p: p[0, :1].clone().expand(PAGES, -1, -1, -1), expanded, must=False),
    Holder(
        "overlapping",
        lambda p: p[0].clone().as_strided((4, PAGE_SIZE, 1, HEAD_DIM), (160, 160, 160, 1)),
        expanded,
        must=False,
    ),
    Holder("misaligned", misaligned, expanded, must=False),
]


def state(held) -> list[Tensor]:
    """Return every tensor of a holder, to compare the whole memory after a step."""
    if isinstance(held, nn.Module):
        return [*held.buffers(), *getattr(held, "pools", [])]
    return list(held) if isinstance(held, (list, tuple)) else [held]
