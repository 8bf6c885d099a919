"""Compiled grammars that are kept for requests that bring the same again, in bounded memory.

SGLang keeps each that any request has brought, and so does xgrammar's own compiler behind it: a
client with a schema of its own for each request has the scheduler grow without end.
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
"""What is kept: of both the least. The grammar that came last stays in any case."""


class GrammarCache(OrderedDict):
    """What SGLang's backend keeps compiled grammars in, by their kind and text.

    The least recently used go first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes: dict[Any, int] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        """What is kept, which so becomes the most recently used."""
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        # Whatever went by another way than ours goes here, too.
        self._num_bytes = {kept: self._num_bytes[kept] for kept in self if kept != key}
        self._num_bytes[key] = _size(key, value)
        while len(self) > 1 and (len(self) > MAX_GRAMMARS or self.num_bytes > MAX_BYTES):
            del self[next(iter(self))]

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept, by xgrammar's count."""
        return sum(self._num_bytes[key] for key in self)


def bound(backend: BaseGrammarBackend | None) -> BaseGrammarBackend | None:
    """Have a backend that has just been made keep so much and no more."""
    if backend is None:
        return None
    inner = backend.grammar_backend if isinstance(backend, ReasonerGrammarBackend) else backend
    assert isinstance(inner, XGrammarGrammarBackend), "SMC refuses the others"
    # A compiler that keeps nothing: clear_cache() would leave it the rules of all grammars.
    any_grammar = inner.grammar_compiler.compile_grammar('root ::= "a"')
    inner.grammar_compiler = GrammarCompiler(any_grammar.tokenizer_info, cache_enabled=False)
    backend.cache = GrammarCache()
    return backend


def _size(key: Any, value: Any) -> int:
    grammar = value.grammar if isinstance(value, ReasonerGrammarObject) else value
    compiled = grammar.ctx.memory_size_bytes if isinstance(grammar, XGrammarGrammar) else 0
    return compiled + sum(map(len, map(str, key)))
