"""Run ``python -m sglang_smc_tools.distill``."""

from sglang_smc_tools.distill.cli import main

if __name__ == "__main__":  # an engine's processes import it, too
    raise SystemExit(main())
