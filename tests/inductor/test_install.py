"""The passes: installed at the first trace, composing, cached under a stable uuid, switchable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as config
from holders import HOLDERS
from matrix import equal, run
from pools import make_pool, make_tokens
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import mla_ops
from mla_ops import inductor

BY_NAME = {holder.name: holder for holder in HOLDERS}


@pytest.fixture
def fresh_config():
    inductor.uninstall()
    with config.patch(
        joint_custom_pre_pass=None, post_grad_custom_post_pass=None, force_disable_caches=True
    ):
        torch._dynamo.reset()
        yield
        inductor.uninstall()
    torch._dynamo.reset()


def differs(name, dynamic):
    return not equal(*run(BY_NAME[name], "inductor", dynamic))


@pytest.mark.parametrize(
    "name",
    [
        *("clone", "to_copy", "empty_copy", "repeat_once", "cat_of_one", "padded_by_nothing"),
        *("kept_between_writes", "copied_between_writes", "slice_kept_between_writes"),
        *("written_then_flipped", "written_then_rolled"),
    ],
)
def test_the_passes_are_what_makes_it_right(name, fresh_config, monkeypatch):
    """test_canaries.py tells when torch needs no help any more; this test fails then, too."""
    monkeypatch.setenv("MLA_OPS_INDUCTOR_PASS", "0")
    inductor.uninstall()
    assert differs(name, dynamic=False)
    monkeypatch.delenv("MLA_OPS_INDUCTOR_PASS")
    assert not differs(name, dynamic=False)


def copied_before_a_write_equals_eager():
    tokens, pools = make_tokens(), make_pool()

    def step(kv, other):
        other.copy_(kv * 2)
        mla_ops.append_kv_(kv, tokens.kv_c, tokens.k_pe, tokens.slots)

    torch._dynamo.reset()
    ours, theirs = pools.clone(), pools.clone()
    with torch.inference_mode():
        torch.compile(step, fullgraph=True)(*ours.unbind())
        step(*theirs.unbind())
    return torch.equal(ours, theirs)


def test_uninstall_takes_the_lowerings_back_too(fresh_config, monkeypatch):
    """Symptom: what was to show Inductor as torch ships it ran with our lowerings."""
    assert copied_before_a_write_equals_eager()
    monkeypatch.setenv("MLA_OPS_INDUCTOR_PASS", "0")
    inductor.uninstall()
    assert not copied_before_a_write_equals_eager()
    monkeypatch.delenv("MLA_OPS_INDUCTOR_PASS")
    assert copied_before_a_write_equals_eager()


@pytest.mark.parametrize("name", ["select_inside", "unbind_inside", "narrow_inside"])
def test_without_the_pass_a_symbolic_offset_is_refused(name, fresh_config, monkeypatch):
    monkeypatch.setenv("MLA_OPS_INDUCTOR_PASS", "0")
    with pytest.raises(Exception, match="symbolic storage offset while the Inductor pass is off"):
        differs(name, dynamic=True)


def test_installed_by_the_first_trace_not_by_import():
    code = (
        "import torch, mla_ops, sys\n"
        "assert not any(m.startswith('torch._inductor') for m in sys.modules)\n"
        "kv = torch.zeros(2, 4, 1, 160)\n"
        "f = lambda kv: mla_ops.append_kv_(kv, torch.ones(1, 128), torch.ones(1, 32),"
        " torch.tensor([3]))\n"
        "torch.compile(f, backend='aot_eager')(kv)\n"
        "assert mla_ops.inductor.installed()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


class Recorder(CustomGraphPass):
    def __init__(self):
        self.ran = 0

    def __call__(self, graph):
        self.ran += 1

    def uuid(self):
        return "recorder"


@pytest.mark.parametrize("many", [False, True], ids=["one", "sequence"])
def test_composes_with_the_users_passes(fresh_config, many):
    recorder = Recorder()
    config.joint_custom_pre_pass = [recorder] if many else recorder
    assert not differs("clone", dynamic=False)
    assert recorder.ran > 0
    assert "recorder" in config.joint_custom_pre_pass.uuid()
    inductor.uninstall()
    current = config.joint_custom_pre_pass
    assert (current[0] if many else current) is recorder


def test_uuid_is_stable_and_absent_beside_a_pass_without_one(fresh_config):
    inductor.install()
    first = config.joint_custom_pre_pass.uuid()
    inductor.uninstall()
    inductor.install()
    assert config.joint_custom_pre_pass.uuid() == first is not None
    inductor.uninstall()
    config.joint_custom_pre_pass = lambda graph: None
    inductor.install()
    assert config.joint_custom_pre_pass.uuid() is None


def test_uuid_is_that_of_another_process_and_of_all_of_the_package(fresh_config, monkeypatch):
    """Symptom: a graph of before an upgrade was used after a change in a file left out."""
    inductor.install()
    program = (
        "import torch._inductor.config as config\nfrom mla_ops import inductor\n"
        "inductor.install()\nprint(config.joint_custom_pre_pass.uuid())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-O", "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(config.joint_custom_pre_pass.uuid())
    install = sys.modules["mla_ops.inductor.install"]
    own = install._text()
    for file in Path(install.__file__).parent.glob("*.py"):
        read = Path.read_bytes
        monkeypatch.setattr(
            *(Path, "read_bytes"),
            lambda path, changed=file, read=read: read(path) + (b"#" if path == changed else b""),
        )
        assert install._text.__wrapped__() != own, file
        monkeypatch.undo()


def test_uninstall_inside_enable_takes_out_the_right_pass(fresh_config):
    """Symptom: it took enable's pass and left ours, which came back at the end of enable."""
    recorder = Recorder()
    config.post_grad_custom_post_pass = recorder
    inductor.install()
    with inductor.enable():
        inductor.uninstall()
        assert not inductor.installed()
        names = [str(part) for part in config.post_grad_custom_post_pass.uuid()]
        assert any("_keep_parts" in name for name in names)
        assert not any("_keep_values" in name for name in names)
    assert not inductor.installed()
    assert "_keep_values" not in str(config.post_grad_custom_post_pass.uuid())
    inductor.install()
    assert inductor.installed()
    assert not differs("clone", dynamic=False)
    assert recorder.ran > 0


# Plans that are returned stay apart, and torch 2.14 drops + 0.
def in_place(buffers, lengths, write):
    outs = []
    for layer in range(4):
        metadata = buffers.update(lengths)
        outs += [metadata.num_splits + 1, metadata.tile_scheduler_metadata + 1]
        if write and layer == 1:
            lengths.add_(1000)
    return outs


def functional(_, lengths, write):
    outs = []
    for layer in range(4):
        outs += [tensor + 1 for tensor in mla_ops.mla_metadata(lengths, num_heads_q=16)]
        if write and layer == 1:
            lengths.add_(1000)
    return outs


def metadata_launches(step, write):
    torch._dynamo.reset()
    buffers = mla_ops.MLAMetadataBuffers(8, num_heads_q=16)
    lengths = torch.tensor([5, 100, 4000], dtype=torch.int32)
    expected = step(mla_ops.MLAMetadataBuffers(8, num_heads_q=16), lengths.clone(), write)
    compiled = torch.compile(step, fullgraph=True)
    outs, (code, *_) = run_and_get_code(compiled, buffers, lengths.clone(), write)
    for got, eager in zip(outs, expected, strict=True):
        assert torch.equal(got, eager)
    return code.count("mla_metadata_out.default(") + code.count("mla_metadata.default(")


@pytest.mark.parametrize("step", [in_place, functional])
def test_repeated_metadata_collapses_to_one_only_when_asked(step, fresh_config):
    assert metadata_launches(step, write=False) == 4
    with inductor.enable():
        assert metadata_launches(step, write=False) == 1
        # Lengths written between the second and the third call: two plans are needed.
        assert metadata_launches(step, write=True) == 2
