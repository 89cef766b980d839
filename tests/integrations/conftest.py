"""Tests of the transformers bridge run where transformers is installed, without gradients."""

import pytest
import torch


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    # Tiny tensors: more threads only wait for each other.
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
