"""`python bench/soak`: see cli.py."""

import signal
import sys
from pathlib import Path

# Python has put this folder first; the benchmarks import each other from the one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo import treat_as_ctrl_c
from soak.cli import main

if __name__ == "__main__":
    treat_as_ctrl_c(signal.SIGTERM, signal.SIGHUP)
    sys.exit(main())
