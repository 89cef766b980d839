"""Packages that look like each generation of flash_mla, computing with the reference on the CPU.

Each is source text for a package directory; ``calls`` records the arguments of every decode.
"""

import importlib
import sys

import pytest

from mla_ops.backends import flash_mla, flash_mla_api
from mla_ops.ops._decode_plan import forget_plans

COMMON = """
import torch
from mla_ops.backends import reference

calls = []


def attend(q, kv, head_size_v, lengths, table, scale, causal, meta, splits, *extra):
    calls.append((q, kv, head_size_v, lengths, table, scale, causal, meta, splits, *extra))
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, head_size_v))
    lse = torch.empty((batch, seqlen_q, heads)).transpose(1, 2)
    reference.mla_decode_out(
        *(q, kv, table, lengths, meta, splits, out, lse),
        softmax_scale=scale, causal=causal, attn_sink=None,
    )
    return out, torch.where(lse == -torch.inf, torch.inf, lse)
"""

OPERATOR = (
    COMMON
    + """
library = torch.library.Library("{namespace}", "FRAGMENT")
library.define(
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, "
    "Tensor block_table, float softmax_scale, bool is_causal, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits{extra}) -> (Tensor, Tensor)"
)
library.impl("dense_decode_fwd", attend, "CPU")
"""
)

LEGACY = {"flash_mla/__init__.py": OPERATOR.format(namespace="flash_mla_legacy", extra="")}
VLLM = {
    "vllm/__init__.py": "",
    "vllm/_flashmla_C.py": OPERATOR.format(namespace="_flashmla_C", extra=", Tensor? out_"),
}
OTHER_SIGNATURE = {
    "flash_mla/__init__.py": OPERATOR.format(namespace="flash_mla_legacy", extra=", int x")
}
# The 2026 source releases: an object filled by the first decode.
OBJECT = """
def get_mla_metadata(*args, **kwargs):
    return object(), None


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,
                           tile_scheduler_metadata, num_splits=None, **options):
    raise AssertionError("must not be called")
"""
PYBIND = {
    "flash_mla/__init__.py": "import flash_mla.cuda\n" + OBJECT,
    "flash_mla/cuda.py": COMMON + "dense_decode_fwd = attend\n",
}
WITHOUT_DENSE = {"flash_mla/__init__.py": "__version__ = '9.9'\n" + OBJECT}
TWO_TENSORS = {
    "flash_mla/__init__.py": COMMON
    + """
plans = []


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    plans.append((cache_seqlens, num_q_tokens_per_head_k, num_heads_k))
    batch = cache_seqlens.shape[0]
    return cache_seqlens.new_full((3, 8), 7), cache_seqlens.new_full((batch + 1,), 7)


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,
                           tile_scheduler_metadata, num_splits, softmax_scale=None, causal=False):
    out, lse = attend(q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
                      tile_scheduler_metadata, num_splits)
    # What some releases do: junk for rows without tokens, lse in [B, H, S] memory.
    out[cache_seqlens == 0] = 5
    lse[cache_seqlens == 0] = 5
    return out, lse.contiguous()
"""
}
BROKEN = {"flash_mla/__init__.py": "raise OSError('libcudart.so.12: cannot open')\n"}
BROKEN_DEPENDENCY = {"flash_mla/__init__.py": "import a_module_that_is_not_there\n"}


def forget():
    flash_mla_api.find_flash_mla.cache_clear()
    flash_mla._unavailable.cache_clear()
    forget_plans()


@pytest.fixture(name="install")
def install_stub(tmp_path, monkeypatch):
    """Return a function that puts a stub package on the path; the real ones are hidden."""
    libraries = []
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("flash_mla", "vllm"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        flash_mla_api.importlib.util, "find_spec", only_under(tmp_path, importlib.util.find_spec)
    )
    forget()

    def write(files, module="flash_mla"):
        for path, text in files.items():
            target = tmp_path / path
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        flash_mla_api.find_flash_mla()
        loaded = sys.modules.get(module)
        if hasattr(loaded, "library"):
            libraries.append(loaded.library)
        return loaded

    yield write
    for library in libraries:
        library._destroy()
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("flash_mla", "vllm"):
            del sys.modules[name]
    forget()


def only_under(folder, find_spec):
    def found(name):
        spec = find_spec(name)
        inside = spec is not None and str(folder) in str(spec.origin)
        return spec if inside or name not in ("flash_mla", "vllm") else None

    return found
