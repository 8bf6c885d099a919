"""The benchmarks are scripts that import each other by name: their folder must be on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
