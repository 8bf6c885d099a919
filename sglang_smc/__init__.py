"""Add SMC speculative decoding to unmodified SGLang.

SGLang finds this package through its entry points (`pyproject.toml`); no import is needed. This
module has no imports, because SGLang loads its plugins in every process.
"""

__version__ = "0.1.0"
