"""Run ``python -m sglang_smc.tools.view``."""

from sglang_smc.tools.view.page import main

raise SystemExit(main())
