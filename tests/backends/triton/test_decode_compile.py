"""Every configuration the launcher chooses compiles for its devices within their limits."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("triton")

from compile_offline import compile_offline

from mla_ops.backends.triton.combine_kernels import combine_kernel
from mla_ops.backends.triton.decode import choose, choose_combine
from mla_ops.backends.triton.decode_kernels import decode_kernel

SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448, 120: 101376}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# 64 rows on Hopper keep 2 words outside the loop over tiles in memory: all else is in registers.
MOST_SPILLS = {(90, 64): 8}
# A float32 out doubles the rows that a thread stores; their addresses go the same way.
MOST_SPILLS_WIDE = {(90, 64): 64, (90, 16): 2}


def compile_decode(
    arch,
    rows,
    batch,
    dtype=torch.bfloat16,
    *,
    tokens=2**20,
    page_size=64,
    pair=(512, 64),
    seqlen_q=1,
    sink=False,
    out=None,
):
    config = choose(rows, batch, tokens, dtype, SHARED_LIMIT[arch], arch // 10)
    strides = ("page_stride", "q_b", "q_s", "q_h", "out_b", "out_s", "out_h", "lse_b")
    integers = ("batch", "heads", "seqlen_q", "pages", "max_tokens", "table_stride", "lse_s")
    signature = {
        **dict.fromkeys(("q_ptr", "kv_ptr"), f"*{NAMES[dtype]}"),
        **dict.fromkeys(("out_ptr", "partial_ptr"), f"*{NAMES[out or dtype]}"),
        **dict.fromkeys(("table_ptr", "cache_seqlens_ptr"), "*i32"),
        **dict.fromkeys(("sink_ptr", "lse_ptr", "partial_lse_ptr"), "*fp32"),
        **dict.fromkeys((*integers, *strides), "i32"),
        "scale_log2": "fp32",
    }
    constexprs = {
        # Strides of 1 are constants of a launch.
        **{"out_v": 1, "lse_h": 1, "LATENT": pair[0], "ROPE": pair[1], "PAGE_SIZE": page_size},
        **{"ROW_STRIDE": sum(pair), "BLOCK_H": config.block_h, "BLOCK_N": config.block_n},
        **{"GROUPS": -(-rows // config.block_h), "STAGES": config.stages},
        **{"BATCH_BLOCK": min(batch, 1024), "CHUNKED": batch > 1024},
        **{"ONE_QUERY": seqlen_q == 1, "CAUSAL": seqlen_q > 1, "SINK": sink, "UNIT_OUT": True},
        **{"WIDE": dtype == torch.float32, "PDL": arch >= 90},
    }
    stats = compile_offline(
        *(decode_kernel, signature, constexprs, arch),
        num_warps=config.warps,
        num_stages=config.stages,
        aligned=strides,
    )
    return stats, config


def check(arch, stats, config, most_spills=MOST_SPILLS):
    assert stats.registers <= 255
    assert stats.shared <= SHARED_LIMIT[arch]
    assert stats.spills <= most_spills.get((arch, config.block_h), 0)
    # Two programs share a processor's registers and shared memory where the launcher says so.
    assert stats.registers * 32 * config.warps * config.per_sm <= 65536
    assert stats.shared * config.per_sm <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize(("rows", "batch"), [(16, 16), (16, 64), (128, 16)])
def test_decode_fits_every_device(arch, rows, batch):
    check(arch, *compile_decode(arch, rows, batch))


@pytest.mark.parametrize(
    "case",
    [
        {"rows": 32, "batch": 1},
        {"rows": 64, "batch": 64, "seqlen_q": 4, "sink": True},
        {"rows": 16, "batch": 4096, "dtype": torch.float16, "sink": True},
        {"rows": 16, "batch": 1, "page_size": 16, "pair": (256, 32)},
        {"rows": 16, "batch": 1, "dtype": torch.float32},
    ],
    ids=lambda case: "-".join(f"{name}={value}" for name, value in case.items()),
)
def test_decode_fits_hopper_in_every_variant(case):
    check(90, *compile_decode(90, **case))


@pytest.mark.parametrize("arch", [80, 100, 120])
@pytest.mark.parametrize(
    "case",
    [
        {"rows": 64, "batch": 64, "seqlen_q": 4, "sink": True},
        {"rows": 16, "batch": 1, "dtype": torch.float32, "page_size": 1},
    ],
    ids=["queries-sink", "fp32-P1"],
)
def test_decode_fits_other_devices_in_the_variants_that_need_most(arch, case):
    check(arch, *compile_decode(arch, **case))


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        (90, {"rows": 16, "batch": 16}),
        (90, {"rows": 16, "batch": 1, "page_size": 16, "pair": (256, 32)}),
        (90, {"rows": 32, "batch": 1, "dtype": torch.float16}),
        (90, {"rows": 128, "batch": 16}),
        *((arch, {"rows": 64, "batch": 64, "seqlen_q": 4, "sink": True}) for arch in SHARED_LIMIT),
    ],
    ids=str,
)
def test_decode_fits_with_a_float32_out(arch, case):
    stats, config = compile_decode(arch, **case, out=torch.float32)
    check(arch, stats, config, MOST_SPILLS_WIDE)
    words = re.findall(r"HG?MMA|LDL|STL", stats.sass)
    products = [index for index, word in enumerate(words) if "MMA" in word]
    inner = words[products[0] : products[-1]]
    # 64 rows may reload one word a tile.
    assert sum("MMA" not in word for word in inner) <= (config.block_h == 64)
    assert "STL" not in inner


def test_the_loop_over_tiles_keeps_everything_in_registers():
    """Symptom: 290 spills halved the speed of 64 rows; those left lie outside the hot loop."""
    sass = compile_decode(90, 128, 16)[0].sass
    lines = [line for line in sass.splitlines() if re.search(r"HGMMA|LDL|STL", line)]
    products = [index for index, line in enumerate(lines) if "HGMMA" in line]
    assert products
    inner = lines[products[0] : products[-1]]
    assert not [line for line in inner if "HGMMA" not in line]


def test_keys_travel_by_asynchronous_16_byte_copies():
    """Symptom: an unspecialised page stride makes loads byte-wide, several times as slow."""
    sass = compile_decode(90, 16, 1)[0].sass
    assert len(re.findall(r"LDGSTS\.E.*\.128", sass)) >= 18
    assert not re.findall(r"LDG\.E\.U(8|16)", sass)


def compile_combine(arch, row_groups, block_h, tokens, dtype="bf16"):
    combine = choose_combine(row_groups, block_h, tokens, 512)
    strides = ("out_b", "out_s", "out_h", "lse_b")
    integers = ("batch", "heads", "seqlen_q", "max_tokens", "workers", "lse_s")
    signature = {
        **dict.fromkeys(("out_ptr", "partial_ptr"), f"*{dtype}"),
        **dict.fromkeys(("sink_ptr", "lse_ptr", "partial_lse_ptr"), "*fp32"),
        "cache_seqlens_ptr": "*i32",
        **dict.fromkeys((*integers, *strides), "i32"),
    }
    constexprs = {
        **{"out_v": 1, "lse_h": 1, "LATENT": 512, "BLOCK_H": block_h, "BLOCK_N": 64},
        **{"GROUPS": 1, "BATCH_BLOCK": 64, "CHUNKED": False, "SINK": True, "PDL": arch >= 90},
        **{"COLUMNS": combine.columns, "SPLITS": combine.splits},
    }
    return compile_offline(
        *(combine_kernel, signature, constexprs, arch), num_warps=combine.warps, aligned=strides
    )


@pytest.mark.parametrize(
    ("row_groups", "block_h", "tokens"),
    [(1, 16, 4096), (1, 16, 16384), (8, 16, 2**16), (2, 64, 2**16), (64, 16, 2**20), (64, 64, 1)],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_combine_keeps_its_reduction_in_registers(row_groups, block_h, tokens, dtype):
    stats = compile_combine(90, row_groups, block_h, tokens, dtype)
    assert stats.spills == 0
    assert stats.shared <= 4096


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", [80, 100, 120])
def test_combine_fits_other_devices(arch, dtype):
    stats = compile_combine(arch, 1, 16, 16384, dtype)
    assert stats.spills == 0
    assert stats.registers <= 255
    assert stats.shared <= 4096
