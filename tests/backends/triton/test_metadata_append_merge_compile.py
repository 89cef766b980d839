"""What the launchers launch compiles for every architecture without spills."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("triton")

from compile_offline import compile_offline

from mla_ops.backends.triton import append, merge, metadata

ARCHITECTURES = [80, 90, 100, 120]
TYPES = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names
        self.skipped = {p.name for p in kernel.params if p.do_not_specialize}

    def __getitem__(self, grid):
        self.grid = grid
        return self.launch

    def launch(self, *args, num_warps, **constexprs):
        self.num_warps = num_warps
        self.constexprs = constexprs
        self.signature, self.aligned = {}, []
        for name, value in zip(self.arg_names, args, strict=False):
            special = name not in self.skipped
            if isinstance(value, torch.Tensor):
                self.signature[name] = TYPES[value.dtype]
            elif special and value == 1:
                constexprs[name] = 1
            else:
                self.signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if special and value % 16 == 0:
                    self.aligned.append(name)


def compile_launch(monkeypatch, module, kernel_name, arch, call):
    """Compile for ``arch`` exactly what ``call`` launches; return stats and the launch."""
    kernel = getattr(module, kernel_name)
    launch = Recorder(kernel)
    monkeypatch.setattr(module, kernel_name, launch)
    call()
    stats = compile_offline(
        *(kernel, launch.signature, launch.constexprs, arch),
        num_warps=launch.num_warps,
        aligned=launch.aligned,
    )
    return stats, launch


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("batch", [1, 128, 512, 1024, 4096, 16384])
@pytest.mark.parametrize("schedule", ["flash_mla", "balanced"])
def test_metadata(monkeypatch, arch, batch, schedule):
    stats, launch = compile_launch(
        *(monkeypatch, metadata, "_mla_metadata_kernel", arch),
        lambda: metadata.mla_metadata_out(
            *(torch.empty(batch, dtype=torch.int32), torch.empty(132, 8, dtype=torch.int32)),
            torch.empty(batch + 1, dtype=torch.int32),
            overhead=5,
            topk=None,
            topk_length=None,
            schedule=schedule,
        ),
    )
    assert stats.spills == 0
    assert stats.shared <= 48 * 1024
    # A reduction inside one warp needs no shared memory round trip on the serial path.
    assert launch.num_warps == 1 or batch > 64


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (512, 0), (128, 32)])
def test_append(monkeypatch, arch, dtype, latent, rope):
    stats, launch = compile_launch(
        *(monkeypatch, append, "_append_kv_kernel", arch),
        lambda: append.append_kv_(
            torch.empty(3, 64, 1, latent + rope, dtype=dtype),
            *(torch.empty(7, latent, dtype=dtype), torch.empty(7, rope, dtype=dtype)),
            torch.empty(7, dtype=torch.int64),
        ),
    )
    assert launch.grid == (7,)
    assert stats.spills == 0
    # 512 columns over 64 threads: every thread moves 16 bytes at once.
    assert latent < 512 or ".128" in stats.sass


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merge(monkeypatch, arch, dtype):
    outs = torch.empty(4, 2, 1, 16, 512, dtype=dtype)
    lse = torch.empty(2, 1, 16).transpose(1, 2)
    stats, launch = compile_launch(
        *(monkeypatch, merge, "_merge_states_kernel", arch),
        lambda: merge.merge_states(outs, torch.empty(4, 2, 16, 1), torch.empty_like(outs[0]), lse),
    )
    assert launch.grid == (32,)
    assert stats.spills == 0
