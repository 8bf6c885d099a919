"""Run ``python -m sglang_smc.tools.distill``."""

import sys

from sglang_smc.tools.distill.cli import main

if __name__ == "__main__":
    sys.exit(main())
