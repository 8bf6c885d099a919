"""Run `python bench/support`, see run.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks' own folder

from study import as_script
from support.run import main

if __name__ == "__main__":
    as_script(main)
