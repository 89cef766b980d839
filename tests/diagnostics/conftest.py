"""Every test of a diagnosis runs without gradients, as the steps it looks at do."""

import pytest
import torch


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield
