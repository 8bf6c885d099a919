"""Run ``python -m sglang_smc.tools.command``, for when the script ``sglang-smc`` is not on PATH."""

import sys

from sglang_smc.tools.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
