"""Run `python bench/speed`, see run.py."""

import sys
from pathlib import Path

# Python puts this folder first; the benchmarks import each other from its parent.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from speed.run import main
from study import as_script

if __name__ == "__main__":
    as_script(main)
