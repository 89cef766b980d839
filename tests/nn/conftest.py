"""Every test of a layer runs without gradients, from one seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
