"""Run `python bench/fidelity`, see run.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks' own folder

from fidelity.run import Fidelity
from study import as_script

if __name__ == "__main__":
    as_script(Fidelity.main)
