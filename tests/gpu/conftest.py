import pytest
import torch

import mla_ops


@pytest.fixture(autouse=True)
def inference():
    """Run every test without gradients and hand its memory back: pools are gigabytes."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


@pytest.fixture
def flash_mla():
    """Fail, rather than skip, where flash_mla does not run: these tests are about it."""
    reasons = mla_ops.backend_report(device="cuda").reasons["flash_mla"]
    assert not reasons, reasons
    return "flash_mla"
