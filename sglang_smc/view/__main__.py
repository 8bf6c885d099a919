"""``python -m sglang_smc.view``."""

import sys

from sglang_smc.view.cli import main

if __name__ == "__main__":
    sys.exit(main())
