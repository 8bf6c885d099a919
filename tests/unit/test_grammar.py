"""Each particle's own state of its request's grammar, and the compiled grammars that are kept."""

import gc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from populations import population_of
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from toy_grammar import END, maker
from toy_request import begun
from transformers import AutoTokenizer

from sglang_smc.guard import grammar_cache
from sglang_smc.patches import request_state
from sglang_smc.rules import grammar as module
from sglang_smc.rules.base import BatchTexts
from sglang_smc.rules.grammar import Grammar, forked
from sglang_smc.smc.population import Population

# the vocabulary of the logits is larger than that
A = 0
B = 1
C = 2
EOS = 3
VOCAB = 40


def grammar_of(regex: str) -> XGrammarGrammar:
    return maker(regex, ("a", "b", "c", END), VOCAB)()


def thinking(regex: str) -> ReasonerGrammarObject:
    """Anything goes until `b a`, then the grammar."""
    found = ReasonerGrammarObject(grammar_of(regex), [B, A])
    found.maybe_init_reasoning(True)
    return found


def request(grammar: Any, *output: int) -> Any:
    """One whose grammar has read its output, as SGLang has it."""
    req = begun({}, (), grammar)
    req.vocab_size = VOCAB
    req.say(output)
    return req


def population(*tails: list[int], **changes: Any) -> Population:
    return population_of([list(tails)], width=8, **changes)


def legal(masks: torch.Tensor) -> list[Any]:
    """The legal tokens of each mask."""
    if masks.dim() > 1:
        return [legal(mask) for mask in masks]
    return masks.nonzero().flatten().tolist()


def masks(req: Any, of: Population | None = None) -> Grammar:
    return Grammar(BatchTexts([req], of, VOCAB, "cpu"))


def along(of: Grammar, chains: torch.Tensor) -> torch.Tensor:
    """What may follow the first 0, 1, ..., J drafted tokens, ``[N, J + 1, V]``."""
    return of.allowed(chains, 0)[0]


def drafted(*chains: list[int]) -> torch.Tensor:
    return torch.tensor([list(chains)])


EVERYTHING = list(range(VOCAB))


def test_who_weighs_nothing_and_who_has_ended_may_say_anything() -> None:
    """A dead particle's tail may hold what no grammar has ever read, so nobody reads it."""
    req = request(grammar_of("ab*"), A)
    of = population(
        [B, VOCAB - 1],
        [EOS],
        [B],
        log_weights=torch.tensor([[-torch.inf, 0.0, 0.0]]).double(),
        ended=torch.tensor([[False, True, False]]),
    )
    found = along(masks(req, of), drafted([A], [A], [B]))
    assert legal(found[:, 0]) == [EVERYTHING, EVERYTHING, [B, EOS]]


def test_a_token_that_is_illegal_ends_the_reading() -> None:
    """One beyond the tokenizer's own vocabulary would end the process in xgrammar."""
    found = masks(request(grammar_of("a*")), population([], []))
    assert along(found, drafted([VOCAB - 1, A], [B, A]))[:, 1:].all()


def test_thinking_is_free_until_its_end() -> None:
    req = request(thinking("a*c"), C)
    found = along(masks(req, population([], [B], [B, A])), drafted([EOS], [A], [A]))
    expected = [[EVERYTHING, EVERYTHING], [EVERYTHING, [A, C]], [[A, C], [A, C]]]
    assert legal(found) == expected
    assert req.grammar._is_thinking()
    # What the particles read has gone by the request's own grammar; and a token can be taken back.
    twin = forked(req.grammar)
    twin.accept_token(B)
    twin.rollback(1)
    twin.accept_token(B)
    twin.accept_token(A)
    assert not twin._is_thinking() and req.grammar._thinking_match_history == [0]


def test_copies_share_nothing_that_reading_changes() -> None:
    of_plain = "accepted_tokens"
    of_thinking = "_thinking_match_history"
    for grammar, known in ((grammar_of("a*c"), of_plain), (thinking("a*c"), of_thinking)):
        twin = vars(forked(grammar))
        lists = {name: value for name, value in vars(grammar).items() if isinstance(value, list)}
        assert known in lists
        assert [name for name, value in lists.items() if twin[name] is value] == []


def test_only_xgrammars_states_are_copied() -> None:
    with pytest.raises(TypeError, match="BaseGrammarObject"):
        forked(BaseGrammarObject())


def test_the_end_of_a_grammar_is_an_end() -> None:
    """With `ignore_eos` nothing else says so. EOS is none while thinking, nor where illegal."""
    bound = request(grammar_of("ab?"))
    thinks = request(thinking("a"))
    tokens = drafted([A, EOS], [EOS, EOS], [A, B])
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    found = masks(bound).ends(nothing, tokens, population([], [A], [A]))
    assert found.tolist() == [[[False, True], [True, False], [False, False]]]
    found = masks(thinks).ends(nothing, tokens, population([], [B, A, A], []))
    assert found.tolist() == [[[False, False], [True, False], [False, False]]]
    found = masks(bound).ends(nothing[:, :1], drafted([A, EOS]), None)
    assert found.tolist() == [[[False, True]]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The thread's time, what each mask adds to it, and what a collection would add."""
    found = SimpleNamespace(now=0.0, each=0.0, per_collection=0.0)
    fill = XGrammarGrammar.fill_vocab_mask

    def slow(grammar: XGrammarGrammar, *args: Any) -> None:
        found.now += found.each + found.per_collection * gc.isenabled()
        fill(grammar, *args)

    monkeypatch.setattr(module.time, "thread_time", lambda: found.now)
    monkeypatch.setattr(XGrammarGrammar, "fill_vocab_mask", slow)
    return found


@pytest.mark.parametrize(("each", "ends"), [(1e-4, False), (0.03, False), (0.06, True)])
def test_a_slow_grammar_ends_its_request(each: float, ends: bool, clock: SimpleNamespace) -> None:
    """Seven texts: 0.42 s are too long, 0.21 s are not. A round that has begun goes on."""
    req = request(grammar_of("(a|b)*"))
    for clock.each in (each, 0.0, 0.0):
        masks(req, population([], [])).allowed(drafted([A, A, B], [B, A, A]), 0)
    assert (req.to_finish is not None) == ends == (req.grammar is None)
    if ends:
        assert req.to_finish.status_code == 400
        assert re.search(r"0\.42 s.* 60\.0 ms|60\.0 ms.* 0\.42 s", req.to_finish.message)


def test_pythons_garbage_is_not_a_grammars_fault(clock: SimpleNamespace) -> None:
    """Red where a collection that falls into a round ends the request that it fell on."""
    req = request(grammar_of("(a|b)*"))
    clock.per_collection = 0.6
    for _ in range(2):
        masks(req)
    assert req.to_finish is None and gc.isenabled()


def test_the_least_recently_used_grammar_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 3)
    cache = grammar_cache.GrammarCache()
    for name in ("a", "b", "c"):
        cache["regex", name] = grammar_of(name)
    assert cache.get(("regex", "a")) is not None and cache.get(("regex", "x")) is None
    cache["regex", "d"] = grammar_of("d")
    assert [name for _kind, name in cache] == ["c", "a", "d"]
    monkeypatch.setattr(grammar_cache, "MAX_BYTES", 1)
    cache["regex", "e"] = grammar_of("e")
    assert [name for _kind, name in cache] == ["e"] and cache.num_bytes > 1
    cache.clear()
    cache["regex", "f"] = grammar_of("f")
    assert len(cache) == 1 and cache.num_bytes < 100_000


# --- Compiled grammars of SGLang's backend

PAIR = Path(__file__).parents[2] / "bench" / "pair" / "target"
TOKENIZED = 512  # tokens of the pair


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(request_state, "active_config", lambda: "some")
    tokenizer = AutoTokenizer.from_pretrained(PAIR)

    def original(vocab_size: int) -> XGrammarGrammarBackend:
        return XGrammarGrammarBackend(tokenizer, vocab_size=vocab_size)

    return request_state.create_grammar_backend(original, TOKENIZED)


def compiled(backend: Any, number: int) -> tuple[torch.Tensor, bool]:
    """What a request may begin with, as SGLang's grammar manager asks; and whether it was kept."""
    key = ("regex", f"({number}|a+b)c")
    value, was_kept = backend.get_cached_or_future_value(key, False)
    if not was_kept:
        value = value.result()
        backend.set_cache(key, value.copy())
    mask = value.allocate_vocab_mask(TOKENIZED, 1, "cpu")
    value.fill_vocab_mask(mask, 0)
    return mask, was_kept


def test_memory_of_many_grammars_is_bounded(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert torch.equal(again, first)


def test_servers_without_smc_keep_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state, "active_config", lambda: None)
    assert request_state.create_grammar_backend(lambda: "stock") == "stock"
    monkeypatch.setattr(request_state, "active_config", lambda: "some")
    assert request_state.create_grammar_backend(lambda: None) is None  # --grammar-backend none
