"""Run ``python -m sglang_smc_tools.testing``."""

from sglang_smc_tools.testing.cli import main

raise SystemExit(main())
