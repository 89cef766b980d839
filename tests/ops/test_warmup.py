"""warmup: runs every step that will be captured, refuses what would not run."""

import pytest
import torch

import mla_ops
from mla_ops.ops import _warmup


def test_runs_each_batch_size_as_the_model_will(monkeypatch):
    calls = []

    def recorded(q, kv_cache, block_table, lengths, metadata, **options):
        calls.append((tuple(q.shape), tuple(block_table.shape), options["backend"]))
        return mla_ops.mla_decode(q, kv_cache, block_table, lengths, metadata, **options)

    monkeypatch.setattr(_warmup, "mla_decode", recorded)
    mla_ops.warmup(
        num_heads_q=3,
        batch_sizes=(1, 4),
        max_seq_len=100,
        seqlen_q=2,
        latent_dim=128,
        rope_dim=32,
        page_size=16,
        dtype=torch.float32,
        attn_sink=True,
        backend="reference",
        device="cpu",
    )
    assert calls == [
        ((1, 2, 3, 160), (1, 7), "reference"),
        ((4, 2, 3, 160), (4, 7), "reference"),
    ]


def test_runs_the_form_with_the_caller_s_outputs(monkeypatch):
    dtypes = []

    def recorded(*args, out, lse, **options):
        dtypes.append(out.dtype)
        return mla_ops.mla_decode(*args, out=out, lse=lse, **options)

    monkeypatch.setattr(_warmup, "mla_decode", recorded)
    mla_ops.warmup(
        num_heads_q=3, batch_sizes=(2,), max_seq_len=64, out_dtype=torch.float32, device="cpu"
    )
    assert dtypes == [torch.float32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": (2, 0)}, "batch_sizes must be positive, got 0"),
        ({"batch_sizes": ()}, "batch_sizes must not be empty"),
        ({"max_seq_len": -100}, "max_seq_len must be positive, got -100"),
        ({"seqlen_q": 0}, "seqlen_q must be positive, got 0"),
        ({"page_size": 0}, "page_size must be positive, got 0"),
        ({"num_heads_q": -1}, "num_heads_q must be positive, got -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refuses_sizes_without_meaning(change, message):
    given = {"num_heads_q": 16, "batch_sizes": (1,), "max_seq_len": 64, **change}
    with pytest.raises(ValueError, match=message):
        mla_ops.warmup(**given, device="cpu")


def test_a_backend_that_cannot_run_raises():
    with pytest.raises(mla_ops.BackendUnavailableError, match="got 'flash_mla'"):
        mla_ops.warmup(
            num_heads_q=16, batch_sizes=(1,), max_seq_len=64, backend="flash_mla", device="cpu"
        )


def test_refuses_to_run_inside_a_graph(monkeypatch):
    monkeypatch.setattr(_warmup, "inside_graph", lambda: "a CUDA graph capture")
    with pytest.raises(RuntimeError, match="outside of graphs, got called in a CUDA graph"):
        mla_ops.warmup(num_heads_q=16, batch_sizes=(1,), max_seq_len=64, device="cpu")
