"""Run ``python -m sglang_smc.command``, for when ``sglang-smc`` is not on PATH."""

from sglang_smc.command.cli import main

raise SystemExit(main())
