"""What holds for every operator: opcheck, golden schemas, refusal of gradients."""

import re
from textwrap import wrap

import pytest
import torch
from expecttest import assert_expected_inline
from refusals import FUNCTIONS, good_arguments

from mla_ops.ops import append, decode, metadata
from mla_ops.testing.samples import OPERATORS, op_samples

ALL = [(name, sample.id) for name in OPERATORS for sample in op_samples(name)]
each_sample = pytest.mark.parametrize(("name", "sample_id"), ALL, ids=[f"{n}-{s}" for n, s in ALL])
WITH_FLOATS = {
    "append_kv_": ("kv_cache", "kv_c", "k_pe"),
    "mla_decode": ("q", "kv_cache", "attn_sink"),
    "mla_decode_out": ("q", "kv_cache", "attn_sink", "out", "lse"),
    "merge_states": ("outs", "lses"),
}
GRADIENTS = [(op, name) for op, names in WITH_FLOATS.items() for name in names]
each_gradient = pytest.mark.parametrize(("op", "name"), GRADIENTS)
REFUSED = "{}: inputs must be without gradient, got requires_grad=True"


def find(name, sample_id):
    return next(sample for sample in op_samples(name) if sample.id == sample_id)


def same(a, b):
    return torch.equal(a.nan_to_num(nan=-123.0), b.nan_to_num(nan=-123.0))


@each_sample
def test_opcheck(name, sample_id):
    sample = find(name, sample_id)
    results = torch.library.opcheck(sample.op, sample.args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@each_sample
def test_a_sample_changes_what_it_mutates_and_nothing_else(name, sample_id):
    sample = find(name, sample_id)
    tensors = [value for value in sample.args if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    sample.op(*sample.args)
    mutated = [id(tensor) for tensor in sample.mutated.values()]
    assert bool(mutated) == sample.op._schema.is_mutable
    for now, then in zip(tensors, before, strict=True):
        assert same(now, then) == (id(now) not in mutated)


@each_sample
def test_fake_results_equal_the_kernels(name, sample_id):
    """Shape, dtype, stride and device, on the CPU and for CUDA tensors that are not there."""
    sample = find(name, sample_id)
    real = sample.op(*sample.args) or ()
    for device in ("cpu", "cuda"):
        with torch._subclasses.FakeTensorMode():
            args = [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device)
                if isinstance(v, torch.Tensor)
                else v
                for v in sample.args
            ]
            if device == "cuda":
                args = ["auto" if v in ("cpu", "reference") else v for v in args]
            fake = sample.op(*args) or ()
        for ours, theirs in zip(fake, real, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (
                *(theirs.shape, theirs.stride(), theirs.dtype),
            )
            assert ours.device.type == device


def test_unknown_samples_are_refused():
    with pytest.raises(ValueError, match=r"op_name must be one of .*got 'decode'"):
        op_samples("decode")


@pytest.mark.parametrize(
    ("name", "module"),
    [("mla_metadata_out", metadata), ("append_kv_", append), ("mla_decode_out", decode)],
)
def test_opcheck_sees_a_mutation_missing_from_the_schema(name, module):
    """Else the opcheck above would prove nothing: torch drops such calls as dead code."""
    op = getattr(torch.ops.mla_ops, name).default
    schema = str(op._schema).removeprefix("mla_ops::")
    for mark in re.findall(r"\([a-z]!\)", schema):
        stripped = schema.replace(mark, "").replace(name, f"{name}_without_{mark[1]}")
        with torch.library._scoped_library("mla_ops_stripped", "FRAGMENT") as library:
            library.define(stripped)
            overload = getattr(torch.ops.mla_ops_stripped, f"{name}_without_{mark[1]}").default
            library.impl(overload._schema.name.split("::")[1], op, "CompositeExplicitAutograd")
            torch.library.register_fake(overload._schema.name, lambda *args: None, lib=library)
            sample = op_samples(name)[0]
            with pytest.raises(Exception, match="is not defined as mutable but was mutated"):
                torch.library.opcheck(overload, sample.args, test_utils="test_schema")
        torch.library.opcheck(op, op_samples(name)[0].args, test_utils="test_schema")


@each_gradient
def test_a_gradient_is_refused(op, name):
    arguments = good_arguments(op)
    arguments[name].requires_grad_()
    before = {key: v.clone() for key, v in arguments.items() if isinstance(v, torch.Tensor)}
    with torch.enable_grad(), pytest.raises(RuntimeError, match=REFUSED.format(op)):
        FUNCTIONS[op](**arguments)
    for key, value in before.items():
        assert torch.equal(arguments[key], value)
    with torch.no_grad():
        FUNCTIONS[op](**arguments)


@each_gradient
def test_a_gradient_is_refused_when_compiled(op, name):
    torch._dynamo.reset()
    arguments = good_arguments(op)
    arguments[name].requires_grad_()
    compiled = torch.compile(FUNCTIONS[op], fullgraph=True, backend="aot_eager")
    with torch.enable_grad(), pytest.raises(Exception, match=REFUSED.format(op)):
        compiled(**arguments)
    with torch.no_grad():
        compiled(**arguments)


@pytest.mark.parametrize("op", WITH_FLOATS)
def test_inference_mode_and_parameters(op):
    with torch.inference_mode():
        arguments = good_arguments(op)
        FUNCTIONS[op](**arguments)


def test_schemas():
    schemas = [str(getattr(torch.ops.mla_ops, name).default._schema) for name in OPERATORS]
    lines = [line for schema in schemas for line in wrap(schema, 92, subsequent_indent="    ")]
    assert_expected_inline(
        "\n".join(lines),
        """\
mla_ops::mla_metadata(Tensor cache_seqlens, SymInt num_heads_q, SymInt seqlen_q, SymInt
    num_heads_k, SymInt? topk, Tensor? topk_length, str? kv_format, str backend, str
    schedule, SymInt? num_sm_parts) -> (Tensor, Tensor)
mla_ops::mla_metadata_out(Tensor cache_seqlens, Tensor(a!) tile_scheduler_metadata,
    Tensor(b!) num_splits, SymInt num_heads_q, SymInt seqlen_q, SymInt num_heads_k, SymInt?
    topk, Tensor? topk_length, str? kv_format, str backend, str schedule) -> ()
mla_ops::append_kv_(Tensor(a!) kv_cache, Tensor kv_c, Tensor k_pe, Tensor slot_mapping,
    Tensor? descale_k=None) -> ()
mla_ops::mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens,
    Tensor? tile_scheduler_metadata, Tensor? num_splits, float softmax_scale, SymInt
    head_dim_v, bool causal, Tensor? attn_sink, Tensor? descale_q, Tensor? descale_k, str
    backend) -> (Tensor, Tensor)
mla_ops::mla_decode_out(Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens,
    Tensor? tile_scheduler_metadata, Tensor? num_splits, float softmax_scale, SymInt
    head_dim_v, bool causal, Tensor? attn_sink, Tensor? descale_q, Tensor? descale_k, str
    backend, Tensor(a!) out, Tensor(b!) lse) -> ()
mla_ops::merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)""",
    )


def test_tags():
    for name in OPERATORS:
        tags = getattr(torch.ops.mla_ops, name).default.tags
        assert torch.Tag.pt2_compliant_tag in tags
        assert torch.Tag.needs_exact_strides in tags
        assert torch.Tag.out not in tags
