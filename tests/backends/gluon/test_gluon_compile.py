"""Kernels as the launcher chooses them compile for Hopper, without spills in the loop: no GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
from compile_offline import read  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from mla_ops.backends import gluon  # noqa: E402
from mla_ops.backends.gluon import decode  # noqa: E402
from mla_ops.shapes import DecodeShape  # noqa: E402

MAX_SHARED = 232448


class OfflineDriver:
    """What Triton asks of a driver before it compiles, answered as on a Hopper device."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class CompileOnly:
    """Stands for a kernel: a launch compiles it with the launcher's own arguments."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launches.append((grid, read(self.kernel.warmup(*args, grid=grid, **kwargs))))

        return launch


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", OfflineDriver())
    found = CompileOnly(decode._mla_decode_kernel), CompileOnly(decode._mla_combine_kernel)
    for kernel in found:
        kernel.kernel.device_caches.clear()
    monkeypatch.setattr(decode, "_mla_decode_kernel", found[0])
    monkeypatch.setattr(decode, "_mla_combine_kernel", found[1])
    return found


# One axis varied at a time, and the corners of register and shared memory use.
CASES = [
    {},
    {"batch": 9},
    {"batch": 100},
    {"batch": 1000, "heads": 32},
    {"batch": 4000, "heads": 64, "page_size": 16},
    {"batch": 4000, "heads": 32},
    {"batch": 4000, "heads": 8, "seqlen_q": 2, "causal": True, "sink": True},
    {"batch": 20, "heads": 64, "seqlen_q": 2, "causal": True, "sink": True, "out_stride": 3},
    {"heads": 32, "dtype": torch.float16},
    {"heads": 64},
    {"heads": 128, "seqlen_q": 8, "sink": True},
    {"batch": 16, "heads": 64, "sink": True},
    {"batch": 2, "heads": 128, "sink": True, "causal": True, "seqlen_q": 1},
    {"batch": 8, "heads": 64, "pages": 128},
    {"batch": 4, "heads": 32, "pages": 8},
    {"heads": 128, "causal": True, "sink": True, "seqlen_q": 1, "page_size": 16},
    {"batch": 4, "seqlen_q": 2, "causal": True, "sink": True, "page_size": 32},
    {"seqlen_q": 2, "causal": True},
    {"page_size": 16},
    {"page_size": 32, "rope": 0},
    {"page_size": 256, "batch": 100, "heads": 64},
    {"batch": 9, "heads": 5, "seqlen_q": 4, "causal": True, "sink": True, "out_stride": 3},
    {"heads": 64, "pages": 400},
    {"heads": 128, "pages": 400},
    {"batch": 3, "heads": 64, "pages": 400},
    {"batch": 25},
]
# And of those with a float32 out: every row tile, the most registers, the longest plan.
CASES += [{**CASES[at], "out": torch.float32} for at in (0, 4, 6, 7, 8, 10, 18, 21, 22)]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()) or "default"
)
def test_compiles_without_spills(kernels, case):
    options = {
        **{"batch": 1, "heads": 16, "seqlen_q": 1, "page_size": 64, "rope": 64, "pages": 200},
        **{"dtype": torch.bfloat16, "causal": False, "sink": False, "out_stride": 1, **case},
    }
    batch, seqlen_q, heads = options["batch"], options["seqlen_q"], options["heads"]
    rows, head_dim = (batch, seqlen_q, heads), 512 + options["rope"]
    q = torch.empty(*rows, head_dim, dtype=options["dtype"])
    out_dtype, out_stride = options.get("out", q.dtype), options["out_stride"]
    decode.mla_decode_out(
        q,
        q.new_empty(2, options["page_size"], 1, head_dim),
        torch.empty(batch, options["pages"], dtype=torch.int32),
        torch.empty(batch, dtype=torch.int32),
        None,
        None,
        torch.empty(*rows, 512 * out_stride, dtype=out_dtype)[..., ::out_stride],
        torch.empty(*rows).transpose(1, 2),
        softmax_scale=0.1,
        causal=options["causal"],
        attn_sink=torch.empty(heads) if options["sink"] else None,
    )
    (grid, stats), (combine_grid, combine_stats) = (kernel.launches[0] for kernel in kernels)
    capacity = options["pages"] * options["page_size"]
    config = decode.decode_config(
        *(batch, seqlen_q * heads), page_size=options["page_size"], capacity=capacity
    )
    # A few words are kept in memory, outside the loop over tiles, with 32 and more rows of strided
    # outputs, and of float32 outputs beside the longest plan.
    longest = config.batch_bucket == 4096 and out_dtype == torch.float32
    strided = config.row_tile >= 32 and out_stride > 1
    assert stats.spills <= (20 if longest else 8 if strided else 0)
    words = re.findall(r"HGMMA|LDL|STL", stats.sass)
    products = [index for index, word in enumerate(words) if word == "HGMMA"]
    assert len(products) == products[-1] - products[0] + 1
    assert combine_stats.spills == 0
    assert stats.registers <= 255
    assert stats.shared <= MAX_SHARED
    if config.decode_warps == 4:
        # The combine kernel starts beside the decode kernel: both must fit into one SM.
        assert (stats.registers + combine_stats.registers) * 4 * 32 <= 65536
        assert stats.shared + combine_stats.shared + 2048 <= MAX_SHARED
    assert stats.sass.count("HGMMA") > 0
    assert stats.sass.count("UTMALDG") > 0
    assert grid[0] <= 132
    assert combine_grid[0] * combine_grid[1] <= max(4096, 8 * combine_grid[0])
    # Products whose operands are not read twice: the scores, and all columns of V or, where there
    # are two warp groups, half of them each.
    scores, values = {0: 32, 64: 36}[options["rope"]], 32 if config.decode_warps == 4 else 16
    assert len(re.findall("HGMMA", stats.sass)) == scores + values


def shape(**change):
    base = DecodeShape(
        *(torch.device("cuda"), torch.bfloat16, torch.bfloat16, 1, 1, 16, 576, 512),
        *(64, 64, 64, 64 * 576, 576),
    )
    return base._replace(**change)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 192])
def test_supports_page_size(page_size):
    assert not gluon.unsupported(shape(page_size=page_size, page_stride=page_size * 576))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": torch.float32}, "q is torch.float32"),
        ({"head_dim": 288, "head_dim_v": 256, "row_stride": 288}, "latent, rope"),
        ({"page_size": 1, "page_stride": 576}, "page_size"),
        ({"page_size": 48, "page_stride": 48 * 576}, "page_size"),
        ({"batch_size": 5000}, "batch size"),
        ({"num_pages": 0}, "at least one page"),
        ({"aligned_cache": False}, "must begin at a multiple of 16 bytes"),
        ({"row_stride": 580, "page_stride": 64 * 580}, "row stride"),
        ({"page_stride": 64 * 576 + 8}, "page stride"),
        ({"num_pages": 2**25}, r"2\*\*31 rows"),
        ({"max_pages": 2**24}, r"2\*\*30 tokens"),
        ({"sequence_span": 2**31}, r"a sequence within 2\*\*31 elements"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_refuses_by_name(change, name):
    (reason,) = gluon.unsupported(shape(**change))
    assert re.search(name, reason)


def test_padded_cache_is_served():
    assert not gluon.unsupported(shape(row_stride=640, page_stride=66 * 640))


def test_single_page_may_have_any_page_stride():
    assert not gluon.unsupported(shape(num_pages=1, page_stride=1))
