import pytest

from mla_ops.cli import bench, bench_timing
from mla_ops.cli.bench_timing import Ceilings


@pytest.fixture
def quick(monkeypatch):
    """Fixed ceilings, few pools and short measurements: the numbers mean nothing here."""
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: Ceilings(10.0, 0.1))
    monkeypatch.setattr(bench, "pools_needed", lambda moved: 3)
    monkeypatch.setattr(bench_timing, "MIN_SECONDS", 0.01)
    monkeypatch.setattr(bench_timing, "MAX_SECONDS", 0.02)
