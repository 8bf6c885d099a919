"""Run ``python -m sglang_smc_tools.view``."""

from sglang_smc_tools.view.page import main

raise SystemExit(main())
