import sys
from pathlib import Path

# The toy operators serve the tests of two packages.
sys.path.insert(0, str(Path(__file__).parent.parent / "diagnostics"))
