"""Run `python bench/steering`, see cli.py."""

import sys
from pathlib import Path

# Python puts this folder first; the benchmarks import each other from its parent, and so do the
# engines' processes, which import the potentials of this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steering.cli import main
from study import as_script

if __name__ == "__main__":
    as_script(main)
