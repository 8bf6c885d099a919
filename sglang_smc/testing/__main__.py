"""``python -m sglang_smc.testing``."""

import sys

from sglang_smc.testing.cli import main

if __name__ == "__main__":
    sys.exit(main())
