"""Run ``python -m sglang_smc.tools.distill``."""

from sglang_smc.tools.distill.cli import main

raise SystemExit(main())
