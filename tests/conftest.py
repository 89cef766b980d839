"""Where tests are skipped, for what reason, and from which seed they run. Nothing else skips."""

import functools

import pytest
import torch

# Marker -> what it needs; the first that is missing gives the reason.
HARDWARE = ("gpu", "sm90", "multi_gpu")


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail tests marked gpu, sm90 or multi_gpu where they would be skipped",
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


@functools.cache
def missing(marker):
    """Say what this machine lacks for tests of ``marker``, or return None."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if marker == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"needs compute capability 9.0, this device has {major}.{minor}"
    if marker == "multi_gpu" and torch.cuda.device_count() < 2:
        return "needs two CUDA devices, there is one"
    return None


def pytest_collection_modifyitems(config, items):
    for item in items:
        reasons = [missing(marker) for marker in HARDWARE if item.get_closest_marker(marker)]
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            reasons.append("takes more than ten seconds (run it with --slow)")
        for reason in filter(None, reasons):
            item.add_marker(pytest.mark.skip(reason=reason))
            break


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    report = outcome.get_result()
    hardware = any(item.get_closest_marker(marker) for marker in HARDWARE)
    if report.skipped and hardware and item.config.getoption("--require-gpu"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}, and --require-gpu allows no skip"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
