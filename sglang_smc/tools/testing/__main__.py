"""Run ``python -m sglang_smc.tools.testing``."""

from sglang_smc.tools.testing.cli import main

raise SystemExit(main())
