"""The reference backend as a backend: any device, no synchronisation, all dtypes."""

import inspect

import oracle
import pytest
import torch

from mla_ops.backends import cpu, reference
from mla_ops.shapes import LATENT_ROPE_PAIRS, DecodeShape
from mla_ops.testing import assert_close_to_fp64, assert_lse_close_to_fp64
from mla_ops.testing.inputs import make_decode_inputs
from mla_ops.testing.samples import OPERATORS, op_samples

FUNCTIONS = ("mla_metadata_out", "append_kv_", "mla_decode_out", "merge_states")


def test_same_interface_as_the_cpu_backend():
    assert reference.__all__ == cpu.__all__
    for name in reference.__all__:
        ours, theirs = getattr(reference, name), getattr(cpu, name)
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_runs_on_every_device(device):
    assert reference.unavailable(torch.device(device)) == []


@pytest.mark.parametrize(("latent", "rope"), LATENT_ROPE_PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_serves_every_checked_call(latent, rope, dtype):
    shape = DecodeShape(
        *(torch.device("cuda"), dtype, dtype, 3, 8, 128, latent + rope, latent, 5, 1, 2, 9, 9)
    )
    assert reference.unsupported(shape) == []


def on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def kernel_call(name, args):
    """Return the function of the reference and its arguments for a call of an operator."""
    if name == "append_kv_":
        return reference.append_kv_, args, {}
    if name == "merge_states":
        out = [torch.empty_like(args[0][0]), torch.empty_like(args[1][0])]
        return reference.merge_states, (*args, *out), {}
    if name == "mla_decode_out":
        options = {"softmax_scale": args[6], "causal": args[8], "attn_sink": args[9]}
        return reference.mla_decode_out, (*args[:6], *args[-2:]), options
    options = {"overhead": 5, "topk": args[6], "topk_length": args[7], "schedule": args[-1]}
    return reference.mla_metadata_out, args[:3], options


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name not in ("mla_metadata", "mla_decode")]
)
def test_never_waits_for_the_device(name):
    """On meta tensors everything runs that needs no value; ``.item()`` or a mask would raise.

    A sync would break CUDA graph capture where the reference serves a CUDA device.
    """
    for sample in op_samples(name):
        function, args, options = kernel_call(name, [on_meta(value) for value in sample.args])
        function(*args, **{key: on_meta(value) for key, value in options.items()})


def test_meta_tensors_show_a_sync():
    """Else the test above would prove nothing: the CPU backend does look at values."""
    sample = op_samples("mla_decode_out")[0]
    _, args, options = kernel_call("mla_decode_out", [on_meta(value) for value in sample.args])
    with pytest.raises(Exception, match="meta"):
        cpu.mla_decode_out(*args, **options)


def far_pool(page_stride):
    """Three pages, the last beyond 2**31 elements; memory that nobody touches is free."""
    memory = torch.empty(2 * page_stride + 2 * 160, dtype=torch.bfloat16)
    return memory.as_strided((3, 2, 1, 160), (page_stride, 160, 160, 1))


@pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
def test_offsets_beyond_31_bits(backend):
    """Symptom elsewhere: 32-bit offsets wrap, writes land in another sequence's pages."""
    far = far_pool(2**30 + 8)
    near = make_decode_inputs(
        (4, 2), num_heads_q=3, latent_dim=128, rope_dim=32, page_size=2, spare_pages=0,
        spare_columns=0,
    )  # fmt: skip
    pages = near.kv_cache.shape[0]
    assert pages == 3
    slots = torch.arange(6)
    tokens = near.kv_cache.view(6, 160)
    backend.append_kv_(far, tokens[:, :128], tokens[:, 128:], slots)
    assert torch.equal(far.nan_to_num(7.0), near.kv_cache.nan_to_num(7.0))
    out = torch.empty(2, 1, 3, 128, dtype=torch.bfloat16)
    lse = torch.empty(2, 3, 1)
    backend.mla_decode_out(
        *(near.q, far, near.block_table, near.cache_seqlens, None, None, out, lse),
        softmax_scale=near.softmax_scale,
        causal=True,
        attn_sink=None,
    )
    expected, expected_lse = oracle.decode(*near)
    assert_close_to_fp64(out, expected)
    assert_lse_close_to_fp64(lse, expected_lse)
