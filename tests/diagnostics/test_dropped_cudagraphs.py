"""What mends CUDA graphs that torch left out, with a reason or, by a setting, without."""

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as config

from mla_ops.diagnostics.measure import CompiledGraph
from mla_ops.diagnostics.measurement import Measurement
from mla_ops.diagnostics.replay_findings import replay_findings
from mla_ops.diagnostics.watch import Call, WatchedGraph, WatchedInput

SETTING = "torch._inductor.config."
# Of this torch: 2.11 has neither of the last two.
SETTINGS = [
    each
    for each in (
        ("triton.cudagraph_trees", False, "True"),
        ("triton.force_cudagraphs_warmup", True, "False"),
        ("triton.cudagraph_capture_sizes", (5,), "None"),
        ("triton.cudagraph_min_partition_size", 9, "0"),
        ("cudagraph_policy", "mine", "None"),
    )
    if each[0] in config.get_config_copy()
]
GRAPH = CompiledGraph("0/0", "", None, None, True, True, None, ())


def found(*, recordings=0, skips=0, reasons=(), size=None):
    """Explain four steps of one graph on CUDA that asked for CUDA graphs."""
    facts = dict.fromkeys(Measurement.__dataclass_fields__)
    facts |= {"recordings": recordings, "skips": skips, "reasons": reasons}
    name = "x.size()[0]" if size else "x"
    inputs = (WatchedInput(name, False, "step.py:3", None, None),)
    calls = [Call(step, (None,), (size,)) for step in range(4)]
    watcher = SimpleNamespace(
        graphs={"0/0": WatchedGraph("0/0", inputs, (), calls)}, fed_back=[], step=3
    )
    return list(
        replay_findings(Measurement(**facts), [GRAPH], watcher, torch.relu, explained=False)
    )


def silent(size=None):
    (only,) = found(size=size)
    assert (only.kind, only.where) == ("cudagraph_silent", "step.py:3")
    return only.fix


@pytest.mark.parametrize(("setting", "value", "kept"), SETTINGS)
def test_a_setting_that_drops_them_is_told(setting, value, kept):
    """Symptom: "run with TORCH_LOGS=+cudagraphs", where a setting of Inductor was the cause."""
    with config.patch({setting: value}):
        assert silent() == f"{SETTING}{setting} = {kept} before the first step"
        assert found(recordings=1) == []
    assert silent() == "run with TORCH_LOGS=+cudagraphs and look for the reason"


def test_a_setting_about_dynamic_sizes_matters_only_to_them():
    name = "triton.cudagraph_skip_dynamic_graphs"
    with config.patch({name: True}):
        assert silent().startswith("run with TORCH_LOGS")
        fix = silent(size=7)
        assert fix == f"{SETTING}{name} = False before the first step; or give x fixed sizes"
        with config.patch({"triton.cudagraph_trees": False}):
            assert f"= True and {SETTING}{name} = False before" in silent(size=7)


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("skipping cudagraphs due to cpp-wrapper does not support graph partition", "cpp_wrapper"),
        ("skipping cudagraphs due to control flow operator: torch.cond.", "torch.where"),
        ("skipping cudagraphs due to index_put_ fallback with boolean indexing is not", "mask"),
        ("skipping cudagraphs due to ['non-Tensor inputs']", "torch.tensor(value)"),
        ("skipping cudagraphs due to input storage mutation (1 instances)", "copy_"),
        ("skipping cudagraphs due to bisector", "compiler_bisector end"),
        ("disabling cudagraphs due to override_cudagraphs annotation", "remove the annotation"),
        ("graph with symbolic shapes inputs and cudagraph_skip_dynamic_graphs=True.", "= False"),
    ],
)
def test_each_reason_that_torch_gives_has_its_fix(reason, fix):
    (only,) = found(skips=1, reasons=(reason,))
    assert (only.kind, only.what) == ("cudagraph_skip", reason)
    assert fix in only.fix
