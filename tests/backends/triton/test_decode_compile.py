"""Every configuration the launcher chooses compiles for its devices without spills."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("triton")

from compile_offline import compile_offline

from mla_ops.backends.triton.decode import choose
from mla_ops.backends.triton.decode_kernels import combine_kernel, decode_kernel

SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448, 120: 101376}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def compile_decode(arch, rows, batch, dtype, page_size=64, latent=512, rope=64):
    config = choose(rows, batch, dtype, SHARED_LIMIT[arch])
    name = NAMES[dtype]
    integers = ("batch", "heads", "seqlen_q", "pages", "max_pages", "table_stride")
    strides = ("page_stride", "row_stride", "q_b", "q_s", "q_h", "out_b", "out_s", "out_h")
    strides += ("lse_b",)
    signature = {
        **dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr", "partial_ptr"), f"*{name}"),
        **dict.fromkeys(("table_ptr", "cache_seqlens_ptr"), "*i32"),
        **dict.fromkeys(("sink_ptr", "lse_ptr", "partial_lse_ptr"), "*fp32"),
        **dict.fromkeys((*integers, *strides, "lse_h", "lse_s"), "i32"),
        "scale_log2": "fp32",
    }
    # A stride of 1 is a constant of the launch, as the unit stride of out is here.
    del signature["lse_h"]
    constexprs = {
        **{"out_v": 1, "lse_h": 1, "LATENT": latent, "ROPE": rope, "PAGE_SIZE": page_size},
        **{"BLOCK_H": config.block_h, "BLOCK_N": config.block_n, "BATCH_BLOCK": 64},
        **{"GROUPS": -(-rows // config.block_h), "STAGES": config.stages, "CAUSAL": False},
        **{"SINK": False, "WIDE": dtype == torch.float32, "PDL": arch >= 90},
    }
    return compile_offline(
        *(decode_kernel, signature, constexprs, arch),
        num_warps=config.warps,
        num_stages=config.stages,
        aligned=strides,
    )


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize(
    ("rows", "batch", "dtype"),
    [(16, 1, torch.bfloat16), (16, 32, torch.bfloat16), (128, 8, torch.bfloat16)],
)
def test_decode_kernel_fits_without_spills(arch, rows, batch, dtype):
    stats = compile_decode(arch, rows, batch, dtype)
    assert stats.spills == 0
    assert stats.registers <= 255
    assert stats.shared <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", [90, 120])
def test_float32_fits(arch):
    stats = compile_decode(arch, 16, 1, torch.float32)
    assert stats.shared <= SHARED_LIMIT[arch]


@pytest.mark.parametrize("columns", [(128, 32), (256, 8)])
def test_combine_keeps_its_reduction_in_registers(columns):
    integers = ("batch", "heads", "seqlen_q", "max_pages", "workers")
    strides = ("out_b", "out_s", "out_h", "lse_b")
    signature = {
        **dict.fromkeys(("out_ptr", "partial_ptr"), "*bf16"),
        **dict.fromkeys(("sink_ptr", "lse_ptr", "partial_lse_ptr"), "*fp32"),
        "cache_seqlens_ptr": "*i32",
        **dict.fromkeys((*integers, *strides, "lse_s"), "i32"),
    }
    constexprs = {
        **{"out_v": 1, "lse_h": 1, "LATENT": 512, "PAGE_SIZE": 64, "BLOCK_H": 16},
        **{"BLOCK_N": 64, "GROUPS": 1, "BATCH_BLOCK": 64, "SINK": False, "PDL": True},
        **{"COLUMNS": columns[0], "SPLITS": columns[1]},
    }
    stats = compile_offline(
        combine_kernel, signature, constexprs, 90, num_warps=1, aligned=strides
    )
    assert stats.spills == 0
    assert stats.shared <= 1024
