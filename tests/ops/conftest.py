import sys
from pathlib import Path

import pytest
import torch

# The oracles serve the tests of several packages.
sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield
