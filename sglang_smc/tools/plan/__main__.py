"""Run ``python -m sglang_smc.tools.plan``."""

from sglang_smc.tools.plan.cli import main

raise SystemExit(main())
