"""Operators shaped like ours, defined here so that these tests depend on no kernel of ours."""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("mla_ops_test_toy", "FRAGMENT")
LIBRARY.define("append_(Tensor(a!) pool, Tensor rows, Tensor slots) -> ()")
LIBRARY.define("read(Tensor pool, Tensor q) -> Tensor")


def _append(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots, rows)


def _read(pool: Tensor, q: Tensor) -> Tensor:
    return q + pool.reshape(-1, pool.shape[-1])[:64].sum(0)


LIBRARY.impl("append_", _append, "CompositeExplicitAutograd")
LIBRARY.impl("read", _read, "CompositeExplicitAutograd")
torch.library.register_fake("mla_ops_test_toy::append_", lambda *_: None, lib=LIBRARY)
torch.library.register_fake(
    "mla_ops_test_toy::read", lambda pool, q: torch.empty_like(q), lib=LIBRARY
)
append_ = torch.ops.mla_ops_test_toy.append_
read = torch.ops.mla_ops_test_toy.read

POOL_SHAPE = (64, 64, 1, 96)
POOL_BYTES = 64 * 64 * 96 * 4


def pool_rows_slots() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(POOL_SHAPE), torch.randn(4, 96), torch.arange(4)


def step(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    append_(pool, rows, slots)
    return read(pool, rows)


def clone(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    copied = pool * 1.0
    return read(copied, rows) + step(pool, rows, slots)


def live_older_value(pool: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    before = pool.clone()
    append_(pool, rows, slots)
    return before, read(pool, rows)


def layout_change(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    return read(pool.transpose(0, 1).contiguous(), rows)


def functional_write(pool: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    written = pool.view(-1, pool.shape[-1]).index_put((slots,), rows)
    return written, read(pool, rows)


def copy_back(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    pool.copy_(pool.flip(0))
    return read(pool, rows)


def fused_away(pool: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    append_(pool, rows, slots)
    return pool.clone().sum()


def rows_between_pools(pool: Tensor, other: Tensor, slots: Tensor) -> Tensor:
    width = pool.shape[-1]
    pool.view(-1, width).index_put_((slots,), other.view(-1, width)[slots + 1])
    return pool.view(-1)[:4] + 1


COPYING = [clone, live_older_value, layout_change, functional_write, copy_back]
