"""A small pool of two layers, the tokens of a step, and what a layer does with both."""

from typing import NamedTuple

import torch
from torch import Tensor

from mla_ops import append_kv_, mla_decode, mla_metadata

LAYERS, PAGES, PAGE_SIZE, HEAD_DIM, LATENT = 2, 6, 4, 160, 128


class Tokens(NamedTuple):
    kv_c: Tensor
    k_pe: Tensor
    slots: Tensor
    other_slots: Tensor
    q: Tensor
    table: Tensor
    lengths: Tensor


def make_pool(seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, PAGES, PAGE_SIZE, 1, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(device)


def make_tokens(count: int = 3, seed: int = 1, device: str = "cpu") -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(PAGES * PAGE_SIZE // 2, generator=generator)[:count]
    tokens = Tokens(
        kv_c=torch.randn(count, LATENT, generator=generator),
        k_pe=torch.randn(count, HEAD_DIM - LATENT, generator=generator),
        slots=slots,
        other_slots=slots.flip(0) + 3,
        q=torch.randn(count, 1, 2, HEAD_DIM, generator=generator),
        table=torch.randint(0, PAGES // 2, (count, 3), generator=generator, dtype=torch.int32),
        lengths=torch.randint(1, 12, (count,), generator=generator, dtype=torch.int32),
    )
    return Tokens(*(tensor.to(device) for tensor in tokens))


def attend(pool: Tensor, tokens: Tokens) -> Tensor:
    metadata = mla_metadata(tokens.lengths, num_heads_q=2)
    return mla_decode(
        *(tokens.q, pool, tokens.table, tokens.lengths, metadata),
        softmax_scale=0.1,
        head_dim_v=LATENT,
    ).out


def write_and_read(pools, tokens: Tokens):
    outs = []
    for layer, pool in enumerate(pools):
        append_kv_(pool, tokens.kv_c + layer, tokens.k_pe, tokens.slots)
        outs.append(attend(pool, tokens))
    return tuple(outs)
