"""The package as a whole: what importing it does, what it exports, and loading it twice."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import wrap

import pytest
import torch
from expecttest import assert_expected_inline

import mla_ops

PACKAGE = Path(mla_ops.__file__).parent
CACHE = "mla_ops.PagedKVCache(1, 4, 8, latent_dim=128, rope_dim=32, page_size=4)"


def run_fresh(code, *, cwd=None, **environment):
    """Run code in a process of its own; its assertions are ours."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names():
    assert_expected_inline(
        "\n".join(mla_ops.__all__),
        """\
BackendReport
BackendUnavailableError
CacheCapacityError
KVFormat
MLAMetadata
MLAMetadataBuffers
MLAOutput
PagedKVCache
Report
append_kv_
backend_report
check_metadata
explain
inductor
merge_states
mla_decode
mla_metadata
warmup""",
    )
    assert all(hasattr(mla_ops, name) for name in mla_ops.__all__)


def signature(function):
    """Write a signature without annotations: names, order, defaults and keyword-only ones."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    return f"{function.__qualname__}{inspect.Signature(bare)}"


def test_signatures():
    functions = [
        *(mla_ops.mla_metadata, mla_ops.append_kv_, mla_ops.mla_decode, mla_ops.merge_states),
        *(mla_ops.backend_report, mla_ops.explain),
    ]
    for each in (mla_ops.MLAMetadataBuffers, mla_ops.PagedKVCache):
        functions += [
            member
            for name, member in vars(each).items()
            if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_"))
        ]
    lines = [
        line
        for function in functions
        for line in wrap(signature(function), 92, subsequent_indent="    ")
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
mla_metadata(cache_seqlens, *, num_heads_q, seqlen_q=1, num_heads_k=1, topk=None,
    topk_length=None, kv_format=None, backend='auto', schedule='auto', num_sm_parts=None,
    out=None)
append_kv_(kv_cache, kv_c, k_pe, slot_mapping, *, descale_k=None)
mla_decode(q, kv_cache, block_table, cache_seqlens, metadata=None, *, softmax_scale,
    head_dim_v=512, causal=True, attn_sink=None, descale_q=None, descale_k=None,
    backend='auto', out=None, lse=None)
merge_states(outs, lses)
backend_report(*, device=None, dtype=torch.bfloat16, batch_size=1, seqlen_q=1,
    num_heads_q=16, head_dim=576, head_dim_v=512, page_size=64, max_seq_len=4096,
    out_dtype=None)
explain(fn, *args, steps=3, mode='reduce-overhead', strict=False, inputs=None,
    big_bytes=1048576, **kwargs)
MLAMetadataBuffers.__init__(max_batch_size, *, num_heads_q, max_seqlen_q=1, num_heads_k=1,
    topk=None, backend='auto', schedule='auto', num_sm_parts=None, device=None)
MLAMetadataBuffers.update(cache_seqlens, *, seqlen_q=1)
PagedKVCache.__init__(num_layers, max_batch_size, max_seq_len, *, latent_dim=512,
    rope_dim=64, page_size=64, num_pages=None, kv_format=<KVFormat.DENSE: 'dense'>,
    dtype=torch.bfloat16, device=None)
PagedKVCache.kv_cache(layer)
PagedKVCache.allocate(row, num_tokens)
PagedKVCache.free(row)
PagedKVCache.reset()
PagedKVCache.advance_(batch_size, num_tokens=1)
PagedKVCache.append_(layer, kv_c, k_pe, slot_mapping)""",
    )


def test_results_are_named_tuples():
    assert mla_ops.MLAMetadata._fields == ("tile_scheduler_metadata", "num_splits")
    assert mla_ops.MLAOutput._fields == ("out", "lse")


def test_import_loads_no_kernels_and_leaves_cuda_alone():
    run_fresh(
        "import sys, mla_ops, torch\n"
        "for name in ('triton', 'flash_mla', 'transformers', 'rich', 'torch._inductor'):\n"
        "    assert name not in sys.modules, name\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [m for m in sys.modules if m.startswith('mla_ops.backends.')]\n"
    )


def test_import_survives_a_broken_kernel_package(tmp_path):
    """Symptom elsewhere: an import error of flash_mla or triton takes the whole package down."""
    for name in ("flash_mla", "triton"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('broken at import')\n")
    run_fresh(
        "import mla_ops, torch\n"
        "print(mla_ops.backend_report(device='cpu'))\n"
        "lengths = torch.tensor([3], dtype=torch.int32)\n"
        "mla_ops.mla_metadata(lengths, num_heads_q=16)\n",
        PYTHONPATH=str(tmp_path),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_first_call_ever_may_be_the_compiled_one(backend):
    """Nothing is set up by a first eager call, nor allocated and kept by a first traced one."""
    run_fresh(
        "import torch, mla_ops\n"
        f"cache = {CACHE}\n"
        "cache.allocate(0, 8)\n"
        "buffers = mla_ops.MLAMetadataBuffers(4, num_heads_q=2)\n"
        "@torch.no_grad()\n"
        "def step(q, kv_c, k_pe):\n"
        "    slots = cache.advance_(2)\n"
        "    metadata = buffers.update(cache.cache_seqlens.narrow(0, 0, 2))\n"
        "    cache.append_(0, kv_c, k_pe, slots)\n"
        "    return mla_ops.mla_decode(q, cache.kv_cache(0), cache.block_table.narrow(0, 0, 2),\n"
        "        cache.cache_seqlens.narrow(0, 0, 2), metadata, softmax_scale=0.1,\n"
        "        head_dim_v=128)\n"
        "new = lambda *shape: torch.ones(shape, dtype=torch.bfloat16)\n"
        "args = new(2, 1, 2, 160), new(2, 128), new(2, 32)\n"
        f"got = torch.compile(step, fullgraph=True, backend={backend!r})(*args)\n"
        "assert bool((got.out[0] == 1).all()) and bool((got.out[1] == 0).all())\n"
        "assert got.lse[1].isneginf().all()\n"
        "cache.cache_seqlens.zero_()\n"
        "again = step(*args)\n"
        "assert torch.equal(again.out, got.out) and torch.equal(again.lse, got.lse)\n",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )


MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
USE = (
    "lengths = torch.tensor([3, 70], dtype=torch.int32)\n"
    "mla_ops.mla_metadata(lengths, num_heads_q=16)\n"
    f"cache = {CACHE}\n"
    "cache.allocate(0, 3)\n"
    "cache.append_(0, torch.ones(4, 128).bfloat16(), torch.ones(4, 32).bfloat16(),\n"
    "              cache.advance_(4))\n"
    "out, lse = mla_ops.mla_decode(torch.ones(4, 1, 2, 160).bfloat16(), cache.kv_cache(0),\n"
    "    cache.block_table, cache.cache_seqlens, softmax_scale=0.1, head_dim_v=128)\n"
    "assert bool((out[0] == 1).all()) and bool((out[1:] == 0).all())\n"
    "merged = mla_ops.merge_states(torch.stack([out, out]), torch.stack([lse, lse]))\n"
    "assert torch.equal(merged.out, out)\n"
    "f = torch.compile(lambda x: mla_ops.mla_metadata(x, num_heads_q=16).num_splits,\n"
    "                  backend='aot_eager', fullgraph=True)\n"
    "assert f(lengths).tolist()[-1] > 0\n"
)


def test_every_module_can_be_reloaded():
    """Symptom elsewhere: "Tried to register an operator twice" in a notebook."""
    done = run_fresh(
        "import importlib, sys, torch, mla_ops\n"
        f"{USE}"
        f"for name in {MODULES}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        if getattr(error, 'name', '').split('.')[0] in ('triton', 'rich', 'flash_mla'):\n"
        "            print('left out', name)\n"
        "            continue\n"
        "        raise\n"
        "    importlib.reload(sys.modules[name])\n"
        f"{USE}"
        "importlib.reload(mla_ops)\n"
        f"{USE}"
    )
    assert "mla_ops.ops" not in done, "only modules of optional packages may be left out"


@pytest.mark.parametrize("first", ["original", "copy"])
def test_a_second_copy_under_another_path(tmp_path, first):
    shutil.copytree(PACKAGE, tmp_path / "mla_ops", ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(PACKAGE.parent), str(tmp_path)]
    paths = paths if first == "original" else paths[::-1]
    run_fresh(
        "import sys, torch\n"
        f"sys.path.insert(0, {paths[0]!r})\n"
        "import mla_ops\n"
        "first = mla_ops\n"
        f"{USE}"
        "for name in [m for m in sys.modules if m.split('.')[0] == 'mla_ops']:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {paths[1]!r})\n"
        "import mla_ops\n"
        "assert mla_ops.__file__ != first.__file__\n"
        f"{USE}"
        "mla_ops = first\n"
        f"{USE}",
        cwd=tmp_path.parent,
    )


def test_a_copy_with_another_schema_is_refused(tmp_path):
    """Two versions in one process would share one operator: a wrong number without an error."""
    shutil.copytree(PACKAGE, tmp_path / "mla_ops", ignore=shutil.ignore_patterns("__pycache__"))
    merge = tmp_path / "mla_ops" / "ops" / "merge.py"
    text = merge.read_text()
    assert "merge_states(Tensor outs, Tensor lses)" in text
    merge.write_text(text.replace("(Tensor outs, Tensor lses)", "(Tensor outs, Tensor[] lses)"))
    run_fresh(
        "import sys, mla_ops\n"
        "for name in [m for m in sys.modules if m.split('.')[0] == 'mla_ops']:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n"
        "    import mla_ops\n"
        "except ImportError as error:\n"
        "    assert 'merge_states: operator must be defined once' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('two versions were loaded')\n",
        cwd=tmp_path.parent,
    )


def test_no_module_holds_a_tensor():
    """State is a tensor argument, never a global."""
    run_fresh(
        "import gc, sys, torch, mla_ops\n"
        # Dynamo keeps some tensors of its own, empty ones besides.
        "torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2))\n"
        "torch._dynamo.reset()\n"
        "def tensors():\n"
        "    return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel()]\n"
        "before = set(map(id, tensors()))\n"
        "def use():\n" + "".join(f"    {line}\n" for line in USE.splitlines()) + "use()\n"
        "torch._dynamo.reset()\n"
        "gc.collect()\n"
        "left = [o for o in tensors() if id(o) not in before]\n"
        "assert not left, left\n"
    )


def test_the_version_of_torch_is_supported():
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


@pytest.mark.parametrize("name", ["doctor?", "--nonsense"])
def test_an_unknown_subcommand_is_told_without_a_traceback(name):
    command = [sys.executable, "-m", "mla_ops", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
