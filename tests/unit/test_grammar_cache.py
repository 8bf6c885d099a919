"""Compiled grammars of SGLang's backend stay within their bound, and come again as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from transformers import AutoTokenizer

from sglang_smc.patches import request_state
from sglang_smc.requests import grammar_cache

PAIR = Path(__file__).parents[2] / "bench" / "pair" / "target"
VOCAB = 512


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As the hook makes it, in a server with SMC."""
    monkeypatch.setattr(request_state, "active_config", lambda: "some")
    tokenizer = AutoTokenizer.from_pretrained(PAIR)

    def original(vocab_size: int) -> XGrammarGrammarBackend:
        return XGrammarGrammarBackend(tokenizer, vocab_size=vocab_size)

    return request_state.create_grammar_backend(original, VOCAB)


def compiled(backend: Any, number: int) -> tuple[Any, bool]:
    """What a request gets, as SGLang's grammar manager asks for it; and whether it was kept."""
    key = ("regex", f"({number}|a+b)c")
    value, was_kept = backend.get_cached_or_future_value(key, False)
    if not was_kept:
        value = value.result()
        backend.set_cache(key, value.copy())
    return value, was_kept


def allowed(grammar: Any) -> torch.Tensor:
    mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask


def test_many_grammars_take_no_more_memory_than_the_bound(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where either of the two that keep them, SGLang and xgrammar, keeps all."""
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 8)
    first, was_kept = compiled(backend, 0)
    assert not was_kept and compiled(backend, 0)[1]
    for number in range(1, 60):
        compiled(backend, number)
    assert len(backend.cache) == 8
    assert backend.grammar_compiler.get_cache_size_bytes() == 0
    again, was_kept = compiled(backend, 0)
    assert not was_kept, "the first was dropped"
    assert torch.equal(allowed(again), allowed(first))


def test_servers_without_smc_keep_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state, "active_config", lambda: None)
    assert request_state.create_grammar_backend(lambda: "stock") == "stock"
    monkeypatch.setattr(request_state, "active_config", lambda: "some")
    assert request_state.create_grammar_backend(lambda: None) is None  # --grammar-backend none
