"""Run ``python -m sglang_smc.tools.view``."""

from sglang_smc.tools.view.page import main

if __name__ == "__main__":
    raise SystemExit(main())
