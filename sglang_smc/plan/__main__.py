"""``python -m sglang_smc.plan``."""

import sys

from sglang_smc.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
