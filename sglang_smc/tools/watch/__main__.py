"""Run ``python -m sglang_smc.tools.watch``."""

import sys

from sglang_smc.tools.watch.cli import main

if __name__ == "__main__":
    sys.exit(main())
