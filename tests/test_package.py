"""Importing is light, repeatable, and needs nothing to have run before."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_import_loads_no_kernel_package_and_leaves_cuda_alone():
    run(
        "import sys, torch, mla_ops\n"
        "packages = ('triton', 'flash_mla', 'transformers', 'rich')\n"
        "loaded = [name for name in packages if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
    )


def test_the_first_call_ever_may_be_the_compiled_one():
    run(
        "import torch, mla_ops\n"
        "cache = mla_ops.PagedKVCache(1, 2, 64, dtype=torch.float32)\n"
        "cache.allocate(0, 8)\n"
        "@torch.compile(fullgraph=True)\n"
        "def step(q, c, p):\n"
        "    cache.append_(0, c, p, cache.advance_(2))\n"
        "    m = mla_ops.mla_metadata(cache.cache_seqlens, num_heads_q=4)\n"
        "    return mla_ops.mla_decode(q, cache.kv_cache(0), cache.block_table,\n"
        "        cache.cache_seqlens, m, softmax_scale=0.1)\n"
        "out, lse = step(torch.ones(2, 1, 4, 576), torch.ones(2, 512), torch.ones(2, 64))\n"
        "assert (out[0] == 1).all() and (out[1] == 0).all()\n"
        "assert (lse[1] == -torch.inf).all()\n"
    )


def test_every_module_reloads():
    run(
        "import importlib, sys, torch, mla_ops\n"
        "names = sorted(m for m in sys.modules if m.split('.')[0] == 'mla_ops')\n"
        "for name in names: importlib.reload(sys.modules[name])\n"
        "assert mla_ops.mla_metadata(torch.ones(1, dtype=torch.int32), num_heads_q=1)\n"
    )


def test_a_second_copy_under_another_path_shares_the_operators(tmp_path):
    (tmp_path / "mla_ops").symlink_to(ROOT / "mla_ops")
    run(
        "import sys, torch, mla_ops\n"
        "for name in [m for m in sys.modules if m.split('.')[0] == 'mla_ops']:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import mla_ops as second\n"
        f"assert second.__file__.startswith({str(tmp_path)!r})\n"
        "assert second.mla_metadata(torch.ones(1, dtype=torch.int32), num_heads_q=1)\n"
    )


def test_another_version_in_the_same_process_is_refused():
    run(
        "import torch\n"
        "library = torch.library.Library('mla_ops', 'FRAGMENT')\n"
        "library.define('append_kv_(Tensor(a!) kv) -> ()')\n"
        "try:\n"
        "    import mla_ops\n"
        "except ImportError as error:\n"
        "    assert 'two versions of mla_ops are loaded' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('was not refused')\n"
    )


@pytest.mark.parametrize("name", ["doctor?", "--nonsense"])
def test_an_unknown_subcommand_is_one_line(name):
    command = [sys.executable, "-m", "mla_ops", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
