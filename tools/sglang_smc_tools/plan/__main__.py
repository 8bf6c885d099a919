"""Run ``python -m sglang_smc_tools.plan``."""

from sglang_smc_tools.plan.cli import main

raise SystemExit(main())
