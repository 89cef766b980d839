"""The committed results of scripts/bench_decode.py say what is claimed of them."""

import json
import math
from pathlib import Path

from bench_decode import GLUON, VLLM

RESULTS = Path(__file__).parents[1] / "scripts" / "results"


def times(name):
    """Return us by backend for each shape (b, h, k, s)."""
    found = json.loads((RESULTS / f"{name}_h200.json").read_text())["results"]
    return {tuple(result.get(axis, 1) for axis in "bhks"): result["us"] for result in found}


def flash_mla_over_gluon():
    return {shape: us["FM"] / us["gluon"] for shape, us in times("gluon").items()}


def test_auto_as_timed_is_near_the_best_of_every_shape():
    """What auto ran in the sweep, not what its table says; FlashMLA's own schedule counts too."""
    sweep = times("decode_sweep").values()
    assert len(sweep) == 200
    for us in sweep:
        others = [value for name, value in us.items() if name != "auto"]
        assert min(others) >= 0.97 * us["auto"], us


def test_gluon_beats_flash_mla_by_what_is_asked():
    ratios = flash_mla_over_gluon()
    for shape, least in GLUON.items():
        assert ratios[(*shape, 1)] >= least, shape
    few_rows = [math.log(ratios[(*shape, 1)]) for shape in GLUON if shape[1] == 16]
    assert len(few_rows) == 11
    assert math.exp(sum(few_rows) / 11) >= 1.6


def test_two_queries_keep_the_ratio_of_one():
    ratios = flash_mla_over_gluon()
    for length in (1024, 4096, 16384, 131072):
        assert ratios[1, 16, length, 2] >= 0.9 * ratios[1, 16, length, 1], length


def test_triton_beats_vllm_by_what_is_asked_but_for_two_shapes():
    us = times("decode")
    reached = [vllm / us[(*shape, 1)]["triton"] / least for shape, (vllm, least) in VLLM.items()]
    assert sum(share < 1 for share in reached) <= 2
    assert min(reached) >= 0.9
