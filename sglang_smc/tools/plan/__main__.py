"""Run ``python -m sglang_smc.tools.plan``."""

import sys

from sglang_smc.tools.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
