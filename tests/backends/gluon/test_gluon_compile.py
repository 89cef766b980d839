"""Kernels as the launcher chooses them compile for Hopper, without spills; no GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
from compile_offline import read  # noqa: E402
from offline_launches import CompileOnly, CountOnly, OfflineDriver, launch  # noqa: E402

from mla_ops.backends import gluon  # noqa: E402
from mla_ops.backends.gluon import decode  # noqa: E402
from mla_ops.shapes import DecodeShape  # noqa: E402

MAX_SHARED = 232448
# Combine kernels hold a float of up to 128 parts for each of 8 rows, and what warps exchange.
COMBINE_SHARED = 128 * 8 * 4 + 256
NARROW_LOAD = r"ld\.global\S*\.[bu]16"
FP32 = torch.float32


def replaced(monkeypatch, decode_kernel, combine_kernel):
    monkeypatch.setattr(triton.runtime.driver, "_active", OfflineDriver())
    monkeypatch.setattr(decode, "_mla_decode_kernel", decode_kernel)
    monkeypatch.setattr(decode, "_mla_combine_kernel", combine_kernel)


@pytest.fixture
def decode_kernel(monkeypatch):
    kernel = CompileOnly(decode._mla_decode_kernel)
    replaced(monkeypatch, kernel, CountOnly())
    return kernel


@pytest.fixture
def combine_kernel(monkeypatch):
    kernel = CompileOnly(decode._mla_combine_kernel)
    replaced(monkeypatch, CountOnly(), kernel)
    return kernel


def name_of(case):
    if not isinstance(case, dict):
        return None
    return "-".join(f"{k}{v}".replace("torch.", "") for k, v in case.items()) or "default"


STRIDED = {"causal": True, "sink": True, "out_stride": 3}
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
    {"batch": 2, "heads": 128, "seqlen_q": 2, "causal": True, "sink": True},
    {"batch": 8, "heads": 64, "pages": 128},
    {"heads": 128, "seqlen_q": 2, "causal": True, "sink": True, "page_size": 16},
    {"batch": 4, "seqlen_q": 2, "causal": True, "sink": True, "page_size": 32},
    {"seqlen_q": 2, "causal": True},
    {"page_size": 16},
    {"page_size": 32, "rope": 0},
    {"batch": 100, "heads": 64, "page_size": 256},
    {"batch": 9, "heads": 5, "seqlen_q": 4, "causal": True, "sink": True, "out_stride": 3},
    {"batch": 40, "heads": 64},
    {"heads": 64, "page_size": 16, "pages": 2**14},
    {"heads": 128, "page_size": 16, "pages": 2**14},
    {"batch": 9, "heads": 32, "seqlen_q": 2, "sink": True},
    {"batch": 9, "heads": 64, "page_size": 32},
    {"batch": 100, "heads": 64, "page_size": 16},
    {"batch": 2, "seqlen_q": 2, "sink": True, "pages": 2**12, "out": FP32},
    # The longest plan, the most registers.
    {"batch": 4000, "heads": 32, "sink": True, "page_size": 16, "out": FP32},
    {"batch": 4000, "heads": 8, "seqlen_q": 2, "causal": True, "sink": True, "out": FP32},
    {"batch": 4000, "heads": 64, "page_size": 16, "out": FP32},
    {"batch": 4000, "heads": 128, "seqlen_q": 2, "page_size": 16, "out": FP32},
    {"batch": 20, "heads": 64, "seqlen_q": 2, "causal": True, "sink": True, "out": FP32},
    {**STRIDED, "heads": 128, "seqlen_q": 8, "page_size": 16, "out": FP32},
    {**STRIDED, "batch": 9, "heads": 5, "seqlen_q": 4, "out": FP32},
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_decode_compiles_without_spills(decode_kernel, case):
    config = launch(**case)
    (compiled,), (grid,) = decode_kernel.compiled, decode_kernel.grids
    stats = read(compiled)
    # HGMMAs of a tile: the scores, and all columns of V or, where there are two warp groups, half
    # of them each. Twice: a part's first tile and last sums are peeled.
    products = 4 * (8 + (1 if case.get("rope", 64) else 0)) + (
        32 if config.decode_warps == 4 else 16
    )
    assert stats.sass.count("HGMMA") == 2 * products
    # In the loop the scores begin while the second half of the sums is in flight.
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", stats.sass)
    assert waits == ["0", "1", "1", "0", "0"]
    # From the first product to the last none.
    assert re.fullmatch(
        "[LS]*H+[LS]*", "".join(w[0] for w in re.findall("HGMMA|LDL|STL", stats.sass))
    )
    wide = config.row_tile == 64 and case.get("out") == FP32
    assert stats.spills <= (4 if wide else 0)
    assert stats.shared <= MAX_SHARED
    if config.decode_warps == 4:
        # The combine kernel starts beside the decode kernel: both must fit into one SM. Their
        # registers always do, 255 at most of 8 warps.
        assert stats.shared + COMBINE_SHARED + 2048 <= MAX_SHARED
    assert stats.sass.count("UTMALDG") > 0
    # q is contiguous, so that 16 bytes of it are loaded at once.
    assert not re.search(NARROW_LOAD, compiled.asm["ptx"])
    assert grid[0] <= 132


def test_rows_of_q_that_are_not_aligned_are_loaded_narrowly(decode_kernel):
    """Without this the search for narrow loads might find none because it cannot."""
    launch(batch=9, q_padding=1)
    assert re.search(NARROW_LOAD, decode_kernel.compiled[0].asm["ptx"])


def test_table_stride_beyond_32_bits_is_multiplied_whole(decode_kernel):
    """Cut to 32 bits, pages were looked up in another sequence's row."""
    launch(batch=9, table_stride=2**32 + 16)
    ptx = decode_kernel.compiled[0].asm["ptx"]
    # The only argument of 64 bits that is neither a pointer nor a stride of a TMA descriptor.
    *_, stride = re.findall(r"\.param \.u64 (\w+)", ptx)
    registers = re.findall(rf"ld\.param\.[bu]64\s+(%rd\d+), \[{stride}\];", ptx)
    assert registers
    for register in registers:
        uses = re.findall(rf"^\s*(\S+)\s.*, {register}\b", ptx, flags=re.M)
        assert uses
        assert set(uses) <= {"mul.lo.s64", "mad.lo.s64"}


# By the parts that the combine kernel merges at once.
COMBINE_CASES = [
    (4, {"batch": 1000, "heads": 32, "sink": True, "out_stride": 3}),
    (4, {"batch": 4000}),
    (8, {"batch": 4, "pages": 8, "heads": 32}),
    (16, {"batch": 9}),
    (32, {"heads": 64, "seqlen_q": 4, "sink": True}),
    (64, {"heads": 64}),
    (128, {}),
]


def test_every_combine_kernel_is_compiled():
    assert {parts for parts, _ in COMBINE_CASES} == set(decode._MERGE_WIDTHS)


@pytest.mark.parametrize("out", [torch.bfloat16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("parts", "case"), COMBINE_CASES, ids=name_of)
def test_combine_compiles_without_spills(combine_kernel, parts, case, out):
    assert launch(**case, out=out).combine_parts == parts
    (compiled,), (grid,) = combine_kernel.compiled, combine_kernel.grids
    stats = read(compiled)
    assert stats.spills == 0
    assert stats.shared <= COMBINE_SHARED
    assert grid[0] * grid[1] <= max(4096, 8 * grid[0])


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ({"pages": 10}, 10),
        ({"pages": 66}, 66),
        ({"pages": 67}, 132),
        ({"pages": 200}, 132),
        ({"batch": 6, "pages": 11}, 66),
        ({"batch": 7, "pages": 10}, 132),
        ({"heads": 128, "seqlen_q": 2, "pages": 10}, 40),
        ({"heads": 128, "seqlen_q": 2}, 132),
        ({"heads": 64, "seqlen_q": 5}, 132),
        ({"batch": 133}, 132),
        ({"batch": 4000, "heads": 64}, 132),
    ],
    ids=name_of,
)
def test_grids_of_more_than_half_of_the_sms_take_them_all(monkeypatch, case, blocks):
    kernel = CountOnly()
    replaced(monkeypatch, kernel, CountOnly())
    launch(**case)
    assert kernel.grids == [(blocks,)]


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
