"""Run ``python -m sglang_smc.tools.testing``."""

from sglang_smc.tools.testing.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
