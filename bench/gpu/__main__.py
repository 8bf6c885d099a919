"""`python bench/gpu`: see cli.py; `bash bench/gpu/run.sh` unpacks what it needs first."""

import sys
from pathlib import Path

# In place of this folder, which Python has put first.
sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from gpu.cli import main  # noqa: E402 -- from there
from study import as_script  # noqa: E402

if __name__ == "__main__":
    as_script(main)
