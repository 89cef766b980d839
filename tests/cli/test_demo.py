"""The demo's claims hold, and a model that breaks them fails the command."""

import json
import sys

import pytest
import torch

from mla_ops.__main__ import main
from mla_ops.cli import demo as demo_command
from mla_ops.cli.model import DemoModel, demo_config, read_prompts

SHORT = ["demo", "--device", "cpu", "--layers", "1", "--steps", "24", "--batch", "3"]


def test_demo_passes_and_prints_its_facts(capsys):
    assert main([*SHORT, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    facts = report["facts"]
    assert report["failed"] == []
    assert facts["tokens equal"] == "72 of 72"
    assert facts["graphs"] == facts["metadata launches a step"] == 1
    assert facts["decode launches a step"] == 1
    assert facts["distinct tokens"] >= 16
    assert facts["backend"] == "cpu"


class Faulty(DemoModel):
    """Copies a pool, schedules twice, and decodes something else once it is compiled."""

    def forward(self):
        tokens, logits = super().forward()
        copied = self.cache.kv_cache(0).flip(0).flatten(0, 2)
        weight = (copied @ torch.ones(copied.shape[1], 1)).sum() * 0.0
        self.metadata.update(self.cache.cache_seqlens)
        if torch.compiler.is_compiling():
            logits = -logits
            tokens = logits.argmax(-1)
            self.tokens.copy_(tokens)
        return tokens, logits + weight


def test_each_broken_claim_is_named_and_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(demo_command, "DemoModel", Faulty)
    monkeypatch.setattr(demo_command, "MIN_DISTINCT_TOKENS", 1000)
    assert main(SHORT) == 1
    failed = {
        line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if "FAILED" in line
    }
    assert failed == {
        "pool clones",
        "metadata launches a step",
        "max logit difference",
        "tokens equal",
        "distinct tokens",
    }


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "demo: device must be available"), ("gpu", "demo: device must be cpu, cuda or")],
)
def test_a_device_that_is_absent_is_refused_in_one_line(device, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["demo", "--preset", "x"], []])
def test_bad_arguments_exit_with_a_usage_message(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: python -m mla_ops" in capsys.readouterr().err


def test_model_is_the_same_for_a_seed_and_prefill_equals_decoding_the_prompt():
    """Token by token through the decode step, a prompt ends in the tokens prefill chooses."""
    prompts = [prompt[:length] for prompt, length in zip(read_prompts(3), (9, 5, 9), strict=True)]
    with torch.no_grad():
        first, second = (
            DemoModel(demo_config("small"), num_layers=2, batch_size=3, max_seq_len=64)
            for _ in range(2)
        )
        first.prefill(prompts)
        second.prefill([prompt[:1] for prompt in prompts])
        chosen = first.tokens.clone()
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(p.encode())) for p in prompts])
        for position in range(1, len(ids)):
            second.tokens.copy_(ids[position])
            tokens, _ = second()
            for row, prompt in enumerate(prompts):
                if len(prompt) == position + 1:
                    assert tokens[row] == chosen[row]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_demo_on_cuda_is_recorded_without_skips(dtype, capsys):
    status = main(["demo", "--device", "cuda", "--dtype", dtype, "--json"])
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert status == 0, facts
    assert facts["CUDA graph recordings"] >= 1
    assert facts["CUDA graph skips"] == 0


def test_missing_transformers_are_told_in_one_line(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "mla_ops.cli.demo_transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--device", "cpu", "--transformers"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: transformers must be importable, got import of transformers")
    assert error.endswith("(pip install transformers)\n")
