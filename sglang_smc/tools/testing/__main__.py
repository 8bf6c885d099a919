"""Run ``python -m sglang_smc.tools.testing``."""

import sys

from sglang_smc.tools.testing.cli import main

if __name__ == "__main__":
    sys.exit(main())
