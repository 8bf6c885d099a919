"""``python -m sglang_smc.command``: where the script ``sglang-smc`` is not on the path."""

import sys

from sglang_smc.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
