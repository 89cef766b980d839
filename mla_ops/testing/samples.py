"""One list of samples an operator: it feeds opcheck, correctness and golden tests alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_ops.ops.metadata import mla_metadata
from mla_ops.shapes import METADATA_FIELDS
from mla_ops.testing.inputs import DecodeInputs, make_decode_inputs

__all__ = ["OPERATORS", "Sample", "op_samples"]

_NAN = float("nan")
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class Sample(NamedTuple):
    """One call of an operator; running it changes every tensor that its schema says it mutates."""

    id: str
    op: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]

    @property
    def mutated(self) -> dict[str, Tensor]:
        """The arguments that the call writes, by name."""
        arguments = zip(self.op._schema.arguments, self.args, strict=False)
        return {argument.name: value for argument, value in arguments if argument.is_write}


def op_samples(op_name: str, *, device: torch.device | str = "cpu") -> list[Sample]:
    """Make the samples of ``torch.ops.mla_ops.<op_name>``, with fresh tensors at each call.

    Args:
        op_name: one of ``OPERATORS``.
        device: where the tensors lie.

    Returns:
        Samples with ids such as ``B2-S1-H16-P64-bf16``; no mutated argument is empty.

    Raises:
        ValueError: no operator has that name.
    """
    if op_name not in OPERATORS:
        raise ValueError(
            f"op_samples: op_name must be one of {tuple(OPERATORS)}, got {op_name!r} "
            "(the name in torch.ops.mla_ops)"
        )
    op = getattr(torch.ops.mla_ops, op_name).default
    return [
        Sample(name, op, args) for name, args in OPERATORS[op_name](torch.device(device)).items()
    ]


_Samples = dict[str, tuple[Any, ...]]


def _lengths(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _metadata(device: torch.device) -> _Samples:
    ragged, valid = _lengths(device, 0, 1, 65, 4096), _lengths(device, 0, 1, 65, 2048)
    return {
        "B4-S1-H16": (ragged, 16, 1, 1, None, None, None, "auto", "auto", None),
        "B4-S2-H63-T8": (ragged, 63, 2, 1, None, None, "dense", "auto", "flash_mla", 8),
        "B1-S1-H128-balanced": (ragged[3:], 128, 1, 1, None, None, None, "cpu", "balanced", None),
        "B4-S1-H64-topk": (ragged, 64, 1, 1, 2048, valid, None, "reference", "auto", 5),
        "B0-S1-H16": (ragged[:0], 16, 1, 1, None, None, None, "auto", "auto", None),
    }


def _metadata_out(device: torch.device) -> _Samples:
    samples = {}
    for name, (lengths, *options, num_sm_parts) in _metadata(device).items():
        rows, entries = num_sm_parts or 7, lengths.shape[0] + 1
        # Leading slices of capacity buffers, as MLAMetadataBuffers passes them.
        schedule = torch.full((rows + 3, METADATA_FIELDS), -7, dtype=torch.int32, device=device)
        splits = torch.full((entries + 3,), -7, dtype=torch.int32, device=device)
        samples[name] = (lengths, schedule[:rows], splits[:entries], *options)
    return samples


def _append(device: torch.device) -> _Samples:
    def sample(dtype: str, slots: list[int], **layout: Any) -> tuple[Any, ...]:
        sizes = {"latent_dim": 128, "rope_dim": 32, "page_size": 4, "poison": 0.0, **layout}
        kv_cache = make_decode_inputs(
            (3, 9), dtype=_DTYPES[dtype], device=device, **sizes
        ).kv_cache
        latent_dim = sizes["latent_dim"]
        tokens = torch.randn(
            (len(slots), kv_cache.shape[3] + 16), generator=torch.Generator().manual_seed(1)
        ).to(device, kv_cache.dtype)
        kv_c, k_pe = tokens[:, :latent_dim], tokens[:, latent_dim : kv_cache.shape[3]]
        return kv_cache, kv_c, k_pe, torch.tensor(slots, device=device)

    return {
        "n1-P4-bf16": sample("bf16", [7]),
        "n4-P4-fp32-skipped": sample("fp32", [-1, 5, 1 << 40, 2]),
        "n3-P16-fp16-padded": sample(
            "fp16", [9, 0, 4], page_size=16, padded_rows=True, padded_pages=True
        ),
        "n2-P1-fp64-no_rope": sample("fp64", [1, 3], latent_dim=512, rope_dim=0, page_size=1),
    }


def _decode_inputs(device: torch.device) -> dict[str, tuple[DecodeInputs, dict[str, Any]]]:
    def inputs(lengths: tuple[int, ...], dtype: str, **options: Any) -> DecodeInputs:
        return make_decode_inputs(lengths, dtype=_DTYPES[dtype], device=device, **options)

    small = {"latent_dim": 128, "rope_dim": 32, "page_size": 16}
    return {
        "B2-S1-H16-P64-bf16": (inputs((65, 0), "bf16"), {"scheduled": True}),
        "B3-S2-H5-P16-fp16-strided": (
            inputs((1, 33, 0), "fp16", seqlen_q=2, num_heads_q=5, strided_q=True, **small),
            {"causal": True},
        ),
        "B1-S3-H1-P16-fp32-padded-sink": (
            inputs((40,), "fp32", seqlen_q=3, num_heads_q=1, padded_rows=True, **small),
            {"causal": False, "sink": True},
        ),
        "B2-S1-H3-P16-fp64-reference": (
            inputs((17, 5), "fp64", num_heads_q=3, padded_pages=True, **small),
            {"backend": "reference", "sink": True},
        ),
    }


def _decode_args(
    inputs: DecodeInputs,
    *,
    causal: bool = True,
    scheduled: bool = False,
    sink: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    q = inputs.q
    plan: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if scheduled:
        plan = mla_metadata(inputs.cache_seqlens, num_heads_q=q.shape[2], seqlen_q=q.shape[1])
    attn_sink = torch.linspace(-1.0, 1.0, q.shape[2], device=q.device) if sink else None
    return (*inputs[:4], *plan, *inputs[4:], causal, attn_sink, None, None, backend)


def _decode(device: torch.device) -> _Samples:
    samples = {
        name: _decode_args(inputs, **options)
        for name, (inputs, options) in _decode_inputs(device).items()
    }
    for name, lengths, seqlen_q in (("B0-S1", (), 1), ("B2-S0", (3, 0), 0)):
        empty = make_decode_inputs(lengths, seqlen_q=seqlen_q, num_heads_q=4, device=device)
        samples[f"{name}-H4-P64-bf16"] = _decode_args(empty)
    return samples


def _decode_out(device: torch.device) -> _Samples:
    samples = {}
    for name, (inputs, options) in _decode_inputs(device).items():
        batch, seqlen_q, heads, _ = inputs.q.shape
        shape = (batch, heads, seqlen_q, inputs.head_dim_v + 16)
        low = inputs.q.dtype in (torch.bfloat16, torch.float16)
        for suffix, dtype in {"": inputs.q.dtype, "-fp32_out": torch.float32}.items():
            if suffix and not low:
                continue
            out = torch.full(shape, _NAN, dtype=dtype, device=device)
            lse = torch.full((batch, heads, seqlen_q), _NAN, device=device)
            strided_out = out[..., : inputs.head_dim_v].transpose(1, 2)
            samples[name + suffix] = (*_decode_args(inputs, **options), strided_out, lse)
    return samples


def _merge(device: torch.device) -> _Samples:
    def sample(shape: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        outs = torch.randn(shape, generator=generator).to(_DTYPES[dtype])
        shards, batch, seqlen_q, heads, _ = shape
        lses = torch.randn((shards, batch, heads, seqlen_q), generator=generator)
        if lses.numel():
            lses[0, 0], outs[0, 0] = -torch.inf, _NAN
            lses[:, -1, -1], outs[:, -1, :, -1] = -torch.inf, _NAN
        return outs.to(device), lses.to(device)

    return {
        "K2-B2-S1-H16-V512-bf16": sample((2, 2, 1, 16, 512), "bf16"),
        "K4-B3-S2-H5-V128-fp32": sample((4, 3, 2, 5, 128), "fp32"),
        "K1-B1-S1-H1-V256-fp64": sample((1, 1, 1, 1, 256), "fp64"),
        "K3-B2-S3-H3-V128-fp16": sample((3, 2, 3, 3, 128), "fp16"),
        "K2-B0-S1-H4-V512-bf16": sample((2, 0, 1, 4, 512), "bf16"),
    }


OPERATORS: dict[str, Callable[[torch.device], _Samples]] = {
    "mla_metadata": _metadata,
    "mla_metadata_out": _metadata_out,
    "append_kv_": _append,
    "mla_decode": _decode,
    "mla_decode_out": _decode_out,
    "merge_states": _merge,
}
