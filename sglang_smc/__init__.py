"""SMC speculative decoding for stock SGLang.

SGLang finds this package through its entry points (`pyproject.toml`); nothing here needs importing
by hand. This module stays free of imports because SGLang loads its plugins in every process.
"""

__version__ = "0.1.0"
