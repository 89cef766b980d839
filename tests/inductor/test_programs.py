"""Differential test: random programs mean the same eager and compiled, or are refused by name."""

from contextlib import nullcontext

import pytest
from differential import run_program
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import programs

from mla_ops import inductor

PARTS, PROGRAMS_A_PART = 10, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_equal_eager_or_are_refused_by_name(part):
    """scripts/fuzz_programs.py runs more of them; one part in five has the opt-in passes too."""
    ran = []
    passes = inductor.enable if part % 5 == 4 else nullcontext

    @seed(part)
    @settings(
        max_examples=PROGRAMS_A_PART,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(backends=("inductor", "aot_eager")))
    def check(program):
        with passes():
            outcome = run_program(program)
        ran.append(outcome)
        assert outcome in (None, "refused"), f"{outcome}\n{program}"

    check()
    assert len(ran) >= PROGRAMS_A_PART
    assert None in ran, "every program was refused"
