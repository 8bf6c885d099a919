"""``python -m sglang_smc.watch``."""

import sys

from sglang_smc.watch.cli import main

if __name__ == "__main__":
    sys.exit(main())
