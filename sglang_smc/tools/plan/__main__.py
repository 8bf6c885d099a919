"""Run ``python -m sglang_smc.tools.plan``."""

from sglang_smc.tools.plan.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
