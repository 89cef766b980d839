"""Eager-equal, or refused by name: every holder, static and dynamic, by every compiler."""

import pytest
import torch
from holders import HOLDERS
from matrix import STATIC_ONLY, outcome, read_tables, title
from pools import HEAD_DIM, make_tokens

import mla_ops

COMPILED = ("aot_eager", "inductor", "CUDA graph")
# Held so that torch knows its addresses to stay; it records no graph that mutates another input.
STATIC_ADDRESS = ("module_buffers", "module_attributes", "marked_arguments")
BACKENDS = ["aot_eager", "inductor"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.name)
def test_equals_eager_or_is_refused_by_name(holder, backend, dynamic):
    if holder.name in STATIC_ONLY and dynamic:
        pytest.skip("its buffer is of a fixed batch")
    result = outcome(holder, backend, dynamic)
    assert result in (("ok",) if holder.must else ("ok", "refused"))
    row = read_tables().get(title(), {})
    if row:
        cells = row[holder.name, "dynamic" if dynamic else "static"]
        assert result == cells[backend], "run scripts/holder_table.py --write"


def test_the_committed_tables_hold_what_is_promised():
    """No cell is wrong or failed with the passes, and what must work does, without a copy."""
    tables = read_tables()
    assert {name.split()[2].rstrip(",").rsplit(".", 1)[0] for name in tables} >= {
        *("2.11", "2.13", "2.14")
    }
    keys = {
        (holder.name, shapes)
        for holder in HOLDERS
        for shapes in ("static", "dynamic")
        if (holder.name, shapes) not in [(name, "dynamic") for name in STATIC_ONLY]
    }
    must = {holder.name for holder in HOLDERS if holder.must}
    for name, table in tables.items():
        assert set(table) == keys, name
        for (holder, shapes), cells in table.items():
            compiled = [cells[column].split(",")[0] for column in COMPILED if cells[column] != "-"]
            assert set(compiled) <= {"ok", "refused"}, (name, holder, shapes)
            if cells["CUDA graph"].startswith("ok"):
                recorded = cells["CUDA graph"] == "ok, recorded"
                assert recorded == (holder in STATIC_ADDRESS), (name, holder, shapes)
            if holder in must:
                assert set(compiled) == {"ok"}, (name, holder, shapes)
                assert cells["pool copies"] == "0", (name, holder, shapes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_view_of_an_input_that_begins_inside_its_storage_is_refused(backend, mode):
    """Symptom: the write landed as far behind its place as the input lies in its storage."""
    memory = torch.zeros(12, 4, 1, HEAD_DIM)
    tokens = make_tokens(2)

    def step(pool):
        mla_ops.append_kv_(pool[:3], tokens.kv_c, tokens.k_pe, tokens.slots)

    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        mode(),
        pytest.raises(Exception, match="append_kv_: kv_cache must be a whole input or a view"),
    ):
        torch.compile(step, backend=backend, fullgraph=True)(memory[4:10])
    assert not memory.any()
