import sys
from pathlib import Path

# The oracles serve the tests of several packages.
sys.path.insert(0, str(Path(__file__).parent.parent))
