"""Run ``python -m sglang_smc.tools.view``."""

import sys

from sglang_smc.tools.view.cli import main

if __name__ == "__main__":
    sys.exit(main())
