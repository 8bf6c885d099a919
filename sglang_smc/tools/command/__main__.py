"""Run ``python -m sglang_smc.tools.command``, for when ``sglang-smc`` is not on PATH."""

from sglang_smc.tools.command.cli import main

raise SystemExit(main())
