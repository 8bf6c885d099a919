"""``python -m sglang_smc.distill``."""

import sys

from sglang_smc.distill.cli import main

if __name__ == "__main__":
    sys.exit(main())
