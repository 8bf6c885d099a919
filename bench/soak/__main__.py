"""Run `python bench/soak`, see run.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks' own folder

from soak.run import main
from study import as_script

if __name__ == "__main__":
    as_script(main)
