"""One small model per cause, and the same model mended. ``MARK name`` is on the line to blame."""

import torch
from torch import nn
from toy_ops import LIBRARY, append_, pool_rows_slots, read

import mla_ops

WIDTH = 8

SCALE = 1.0

LIBRARY.define("no_capture(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.define("captured(Tensor x) -> Tensor")
for _name in ("no_capture", "captured"):
    LIBRARY.impl(_name, lambda x: x + 1, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla_ops_test_toy::{_name}", torch.empty_like, lib=LIBRARY)
toy = torch.ops.mla_ops_test_toy


def ones(*shape):
    return torch.ones(shape or WIDTH)


def line(mark):
    """Return "file:line" of the line with a mark."""
    with open(__file__) as file:
        found = [n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# MARK {mark}")]
    assert len(found) == 1, mark
    return f"{__file__}:{found[0]}"


def breaks(x):
    y = x * 2
    print("halfway")  # MARK break
    return y + 1


def whole(x):
    return x * 2 + 1


def reads_item(x):
    return x * x.sum().item()  # MARK item


def keeps_tensor(x):
    return x * x.sum()


def scaled(x, factor):
    return x * factor  # MARK float


def scaled_by_global(x):
    return x * SCALE  # MARK global


def doubled(x):
    return x * 2 - 1  # MARK shape


def summed(x):
    return x.cumsum(0)  # MARK sizes


def writes_argument(x, kv):
    rows = kv[1:]
    rows[0].copy_(x)  # MARK argument
    return kv.sum(0)


def reads_argument(x, kv):
    return x + kv[0]  # MARK copied


def closure_cache():
    cache = torch.zeros(4, WIDTH)

    def step(x):
        cache[1] = x  # MARK closure
        return cache * 2

    return step, cache


def calls_unsafe(x):
    return toy.no_capture(x * 2)  # MARK unsafe


def calls_safe(x):
    return toy.captured(x * 2)


def sized_by_value(x):
    return torch.nonzero(x) * 2  # MARK unbacked


def masked(x):
    return torch.where(x > 0, x, 0) * 2


class StackedCaches(nn.Module):
    """All layers in one tensor, written through a view with aten."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stack", torch.stack([pool_rows_slots()[0]] * 2))

    def forward(self, rows, slots):
        flat = self.stack[1].view(-1, rows.shape[-1])
        flat[slots] = rows  # MARK view
        return read(self.stack[1], rows)


class OwnCaches(nn.Module):
    """A tensor for each layer, written by an operator that works in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", pool_rows_slots()[0])

    def forward(self, rows, slots):
        append_(self.cache, rows, slots)
        return read(self.cache, rows)


class OlderValue(OwnCaches):
    def forward(self, rows, slots):
        before = self.cache * 2.0  # MARK older
        append_(self.cache, rows, slots)
        return before, read(self.cache, rows)


class OlderRows(OwnCaches):
    def forward(self, rows, slots):
        before = self.cache[0, :4] * 2.0
        append_(self.cache, rows, slots)
        return before, read(self.cache, rows)


class Casting(nn.Module):
    """Weights in float32, read in bfloat16."""

    def __init__(self, dtype):
        super().__init__()
        weight = torch.ones(1024, 1024, dtype=dtype)
        self.register_buffer("weight", weight)

    def forward(self, x):
        return x.bfloat16() @ self.weight.to(torch.bfloat16)  # MARK dtype


class Recurrent(nn.Module):
    """Hands the state of a step to the next as the tensor a graph returned."""

    def __init__(self):
        super().__init__()
        self.state = torch.zeros(WIDTH)

    def forward(self, x):
        self.state = self.state * 0.5 + x  # MARK overwritten
        return self.state.sum()


class RecurrentInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x):
        self.state.copy_(self.state * 0.5 + x)
        return self.state.sum()


class Keeping(nn.Module):
    """Keeps its last output, which nothing in the step reads."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = x * 3
        self.last = y + 1  # MARK kept
        return y


class KeepingInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        y = x * 3
        self.last.copy_(y + 1)
        return y


class Offset(nn.Module):
    """Reads a tensor that the engine around it replaces."""

    def __init__(self):
        super().__init__()
        self.offset = torch.zeros(WIDTH)

    def forward(self, x):
        return x - self.offset  # MARK address


class MetadataPerLayer(nn.Module):
    def forward(self, lengths):
        found = []
        for _ in range(2):
            metadata = mla_ops.mla_metadata(lengths, num_heads_q=16)  # MARK metadata
            found.append(metadata.num_splits + 1)
        return found


class MetadataOnce(nn.Module):
    def forward(self, lengths):
        metadata = mla_ops.mla_metadata(lengths, num_heads_q=16)
        return [metadata.num_splits + 1 for _ in range(2)]
