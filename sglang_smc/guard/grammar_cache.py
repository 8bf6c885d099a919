"""Cache compiled grammars for repeated requests, in bounded memory.

SGLang keeps every grammar that a request has brought, and so does xgrammar's own compiler below
it: a client with a new schema in each request makes the scheduler grow without bound.
"""

from collections import OrderedDict
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.constrained.reasoner_grammar_backend import (
    ReasonerGrammarBackend,
    ReasonerGrammarObject,
)
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from xgrammar import GrammarCompiler

MAX_GRAMMARS = 256
MAX_BYTES = 512 << 20
"""Bounds of the cache, which hold together. The latest grammar is always kept."""


class GrammarCache(OrderedDict):
    """An LRU cache of compiled grammars, by kind and text, for SGLang's backend."""

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes: dict[Any, int] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a cached grammar, and make it the most recently used."""
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        # Also drop the sizes of entries that SGLang has removed directly.
        self._num_bytes = {kept: self._num_bytes[kept] for kept in self if kept != key}
        self._num_bytes[key] = _size(key, value)
        while len(self) > 1 and (len(self) > MAX_GRAMMARS or self.num_bytes > MAX_BYTES):
            del self[next(iter(self))]

    @property
    def num_bytes(self) -> int:
        """Return the memory of all cached grammars, by xgrammar's count."""
        return sum(self._num_bytes[key] for key in self)


def bound(backend: BaseGrammarBackend | None) -> BaseGrammarBackend | None:
    """Bound the caches of a new grammar backend."""
    if backend is None:
        return None
    inner = backend.grammar_backend if isinstance(backend, ReasonerGrammarBackend) else backend
    assert isinstance(inner, XGrammarGrammarBackend), "SMC refuses the others"
    # A compiler without a cache: clear_cache() would leave it the rules of all grammars.
    any_grammar = inner.grammar_compiler.compile_grammar('root ::= "a"')
    inner.grammar_compiler = GrammarCompiler(any_grammar.tokenizer_info, cache_enabled=False)
    backend.cache = GrammarCache()
    return backend


def _size(key: Any, value: Any) -> int:
    grammar = value.grammar if isinstance(value, ReasonerGrammarObject) else value
    compiled = grammar.ctx.memory_size_bytes if isinstance(grammar, XGrammarGrammar) else 0
    return compiled + sum(map(len, map(str, key)))
