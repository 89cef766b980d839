import sys
from pathlib import Path

import pytest
import torch

# The oracles serve the tests of several packages.
sys.path.insert(0, str(Path(__file__).parent.parent))
# Small tensors: threads cost ten times what they save where several workers share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield
