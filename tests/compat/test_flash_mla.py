"""The drop-in for flash_mla: both API generations, eager and compiled, never stale."""

import pytest
import torch

import mla_ops
from mla_ops.compat import flash_mla

SCALE = 0.1


def tensors(lengths, heads=16, seqlen_q=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    q = torch.randn(batch, seqlen_q, heads, 576, generator=generator)
    kv_cache = torch.randn(batch * 4, 64, 1, 576, generator=generator)
    table = torch.randperm(batch * 4, generator=generator).int().view(batch, 4)
    return q, kv_cache, table, torch.tensor(lengths, dtype=torch.int32)


def decode_2025(q, kv_cache, table, lengths):
    metadata, splits = flash_mla.get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)
    return flash_mla.flash_mla_with_kvcache(
        q, kv_cache, table, lengths, 512, metadata, splits, softmax_scale=SCALE, causal=True
    )


def decode_2026(q, kv_cache, table, lengths):
    metadata, splits = flash_mla.get_mla_metadata()
    return flash_mla.flash_mla_with_kvcache(
        q, kv_cache, table, lengths, 512, metadata, splits, softmax_scale=SCALE, causal=True
    )


@pytest.mark.parametrize("decode", [decode_2025, decode_2026])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_equals_mla_decode_with_flash_mlas_lse_convention(decode, seqlen_q):
    q, kv_cache, table, lengths = tensors([0, 5, 64, 200], seqlen_q=seqlen_q)
    out, lse = decode(q, kv_cache, table, lengths)
    expected = mla_ops.mla_decode(q, kv_cache, table, lengths, softmax_scale=SCALE)
    assert torch.equal(out, expected.out)
    empty = expected.lse == -torch.inf
    assert empty[0].all()
    assert (lse[empty] == torch.inf).all()
    assert torch.equal(lse[~empty], expected.lse[~empty])


def test_scale_and_mask_default_to_flash_mlas():
    q, kv_cache, table, lengths = tensors([70], seqlen_q=2)
    metadata, splits = flash_mla.get_mla_metadata(lengths, 32, 1)
    out, _ = flash_mla.flash_mla_with_kvcache(q, kv_cache, table, lengths, 512, metadata, splits)
    expected = mla_ops.mla_decode(
        q, kv_cache, table, lengths, softmax_scale=576**-0.5, causal=False
    )
    assert torch.equal(out, expected.out)


@pytest.mark.parametrize("decode", [decode_2025, decode_2026])
def test_compiled_code_stays_right_after_lengths_outgrow_the_first_plan(decode):
    """Symptom: FlashMLA's object keeps the schedule of its first call, wrong once lengths grow."""
    compiled = torch.compile(decode, fullgraph=True)
    q, kv_cache, table, lengths = tensors([1, 1, 0, 3])
    for step in range(100):
        lengths.copy_((torch.tensor([1, 2, 3, 2]) * step).clamp(max=256))
        ours = compiled(q, kv_cache, table, lengths)
        eager = decode(q, kv_cache, table, lengths)
        assert torch.equal(ours[0], eager[0])
        assert torch.equal(ours[1], eager[1])


def test_object_holds_no_state():
    metadata, splits = flash_mla.get_mla_metadata()
    assert splits is None
    q, kv_cache, table, lengths = tensors([10])
    flash_mla.flash_mla_with_kvcache(q, kv_cache, table, lengths, 512, metadata)
    assert vars(metadata) == {}


def test_every_public_name_of_the_package_is_served_or_refused_by_name():
    for name in flash_mla.__all__:
        assert hasattr(flash_mla, name)
    for name in flash_mla.__all__:
        if name.startswith(("flash_attn", "fused")) or name == "flash_mla_sparse_fwd":
            with pytest.raises(NotImplementedError, match=name):
                getattr(flash_mla, name)()


# __all__ of sgl-flash-mla 1.0.0, and what FlashMLA's releases of 2025 have besides.
NAMES = """
get_mla_metadata get_mla_decoding_metadata flash_mla_with_kvcache flash_attn_varlen_func
flash_mla_sparse_fwd fused_norm_rope_attn_rope_cast has_legacy
flash_attn_varlen_qkvpacked_func flash_attn_varlen_kvpacked_func
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_names_of_the_releases_in_use_are_there(name):
    assert name in flash_mla.__all__


@pytest.mark.parametrize("name", ["prefill", "decode", "permute_q_b_proj"])
def test_what_is_taken_from_a_module_that_is_not_served_raises_by_name(name):
    with pytest.raises(NotImplementedError, match=f"fused_norm_rope_attn_rope_cast.{name}"):
        getattr(flash_mla.fused_norm_rope_attn_rope_cast, name)
    with pytest.raises(AttributeError):
        flash_mla.fused_norm_rope_attn_rope_cast.__deepcopy__  # noqa: B018


def test_sgl_flash_mlas_calls_are_served():
    """Its dense decode needs ``use_legacy``, and it plans apart."""
    assert flash_mla.has_legacy()
    q, kv_cache, table, lengths = tensors([0, 5, 64, 200])
    planned = flash_mla.get_mla_decoding_metadata(lengths, 16, 1, 16, use_legacy=True)
    expected = flash_mla.get_mla_metadata(lengths, 16, 1)
    assert all(map(torch.equal, planned, expected))
    metadata, splits = flash_mla.get_mla_metadata()
    # How its documentation hoists the plan.
    metadata.tile_scheduler_metadata, metadata.num_splits = planned
    options = {"softmax_scale": SCALE, "causal": True, "use_legacy": True}
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, kv_cache, table, lengths, 512, metadata, splits, **options
    )
    assert torch.equal(out, decode_2025(q, kv_cache, table, lengths)[0])
    assert torch.equal(lse, decode_2025(q, kv_cache, table, lengths)[1])
    with pytest.raises(NotImplementedError, match="get_mla_decoding_metadata: topk"):
        flash_mla.get_mla_decoding_metadata(lengths, 16, 1, topk=8)


@pytest.mark.parametrize(
    "argument",
    [
        *("is_fp8_kvcache", "indices", "extra_k_cache", "topk_length", "extra_topk_length"),
        *("enable_batch_invariant", "kv_format", "descale_q", "descale_k"),
    ],
)
def test_what_is_not_served_raises_by_name(argument):
    q, kv_cache, table, lengths = tensors([10])
    metadata, _ = flash_mla.get_mla_metadata()
    with pytest.raises(NotImplementedError, match=argument):
        flash_mla.flash_mla_with_kvcache(
            q, kv_cache, table, lengths, 512, metadata, **{argument: True}
        )


def test_half_given_metadata_is_refused():
    q, kv_cache, table, lengths = tensors([10])
    metadata, _ = flash_mla.get_mla_metadata(lengths, 16, 1)
    with pytest.raises(TypeError, match="num_splits must be a tensor"):
        flash_mla.flash_mla_with_kvcache(q, kv_cache, table, lengths, 512, metadata)
    with pytest.raises(TypeError, match="num_q_tokens_per_head_k"):
        flash_mla.get_mla_metadata(lengths)
