"""The debug check: what it accepts, and that it names what does not match."""

import os
import subprocess
import sys

import pytest
import torch

import mla_ops
from mla_ops.ops import decode
from mla_ops.ops._metadata_debug import check_metadata
from mla_ops.testing.inputs import make_decode_inputs

LENGTHS = [0, 1, 64, 65, 4096, 300, 0]


def lengths_of(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("schedule", ["flash_mla", "balanced", "auto"])
@pytest.mark.parametrize("values", [LENGTHS, [7], [0, 0, 0], [120000, 1, 1], [-3, 5], [64] * 300])
def test_a_fitting_schedule_passes(schedule, values):
    lengths = lengths_of(values)
    metadata = mla_ops.mla_metadata(lengths, num_heads_q=16, schedule=schedule)
    check_metadata(metadata, lengths, num_heads_q=16)
    # The same rows and parts: S = 4 of 16 heads fill the same 64 rows.
    check_metadata(metadata, lengths, num_heads_q=16, seqlen_q=4)


def test_flash_mlas_own_idle_rows_and_padding_pass():
    lengths = lengths_of([5, 70])
    rows, splits = mla_ops.mla_metadata(lengths, num_heads_q=16, schedule="flash_mla")
    idle = rows[:, 0] > 2
    assert idle.any()
    rows[idle] = 2
    rows[:, 7] = 12345
    check_metadata((rows, splits), lengths, num_heads_q=16)


@pytest.mark.parametrize("row", range(len(LENGTHS)))
@pytest.mark.parametrize("schedule", ["flash_mla", "balanced"])
def test_one_length_that_moved_by_a_block_is_named(schedule, row):
    lengths = lengths_of(LENGTHS)
    metadata = mla_ops.mla_metadata(lengths, num_heads_q=16, schedule=schedule)
    lengths[row] += 129
    with pytest.raises(ValueError, match=r"schedule of the present cache_seqlens, got row \d+ ="):
        check_metadata(metadata, lengths, num_heads_q=16)


@pytest.mark.parametrize("other", [3, 4, 6, 16])
def test_another_batch_is_named_even_in_slices_of_the_right_shape(other):
    buffers = mla_ops.MLAMetadataBuffers(16, num_heads_q=16)
    buffers.update(lengths_of([50000] * other))
    lengths = lengths_of([50000] * 5)
    stale = (buffers.tile_scheduler_metadata, buffers.num_splits[:6])
    with pytest.raises(ValueError, match=f"5 sequences, got a schedule of {other}"):
        check_metadata(stale, lengths, num_heads_q=16)
    check_metadata(buffers.update(lengths), lengths, num_heads_q=16)
    with pytest.raises(ValueError, match="4 sequences, got a schedule of 5"):
        check_metadata(buffers.update(lengths), lengths[:4], num_heads_q=16)


@pytest.mark.parametrize(("heads", "seqlen_q"), [(128, 1), (16, 8), (65, 1), (64, 2)])
def test_other_heads_or_queries_are_named(heads, seqlen_q):
    lengths = lengths_of(LENGTHS)
    metadata = mla_ops.mla_metadata(lengths, num_heads_q=16)
    with pytest.raises(ValueError, match=f"num_heads_q={heads}, seqlen_q={seqlen_q}, got 132"):
        check_metadata(metadata, lengths, num_heads_q=heads, seqlen_q=seqlen_q)


def test_a_corrupted_prefix_sum_is_named():
    lengths = lengths_of(LENGTHS)
    rows, splits = mla_ops.mla_metadata(lengths, num_heads_q=16)
    splits[3] += 1
    with pytest.raises(ValueError, match=r"num_splits\[3\]"):
        check_metadata((rows, splits), lengths, num_heads_q=16)


def test_inside_a_compiled_region_it_does_nothing():
    lengths = lengths_of([1, 2])
    stale = mla_ops.mla_metadata(lengths_of([4096, 2]), num_heads_q=16)

    @torch.compile(fullgraph=True, backend="eager")
    def step(rows, splits, lengths):
        check_metadata((rows, splits), lengths, num_heads_q=16)
        return lengths + 1

    assert torch.equal(step(*stale, lengths), lengths + 1)


def call(inputs, metadata):
    return mla_ops.mla_decode(*inputs[:4], metadata, softmax_scale=0.1)


def test_every_decode_is_checked_when_asked_for(monkeypatch):
    monkeypatch.setattr(decode, "CHECK_METADATA", True)
    inputs = make_decode_inputs((0, 1, 65))
    metadata = mla_ops.mla_metadata(inputs.cache_seqlens, num_heads_q=16)
    call(inputs, metadata)
    call(inputs, None)
    inputs.cache_seqlens[2] = 64
    with pytest.raises(ValueError, match="mla_decode: metadata must be the schedule of the pres"):
        call(inputs, metadata)
    inputs.cache_seqlens[2] = inputs.block_table.shape[1] * 64 + 1
    with pytest.raises(ValueError, match="at most M \\* P = 192"):
        call(inputs, metadata)


def test_it_is_off_unless_the_environment_says_so():
    assert not decode.CHECK_METADATA
    code = "from mla_ops.ops import decode; print(decode.CHECK_METADATA)"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MLA_OPS_CHECK_METADATA": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "True"
