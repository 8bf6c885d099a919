"""Each particle's own state of its request's grammar."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from populations import population_of
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from sglang_smc.requests import grammar as module
from sglang_smc.requests import grammar_cache
from sglang_smc.requests.grammar import Grammar, forked
from sglang_smc.requests.open_token import OpenToken
from sglang_smc.requests.text_rule import BatchTexts
from sglang_smc.state.population import Population

A, B, C, EOS, VOCAB = 0, 1, 2, 3, 40  # the vocabulary of the logits is larger than that
COMPILER = GrammarCompiler(
    TokenizerInfo(["a", "b", "c", "</s>"], vocab_size=VOCAB, stop_token_ids=[EOS])
)


def grammar_of(regex: str) -> XGrammarGrammar:
    compiled = COMPILER.compile_regex(regex)
    return XGrammarGrammar(GrammarMatcher(compiled), VOCAB, compiled, None, regex)


def thinking(regex: str) -> ReasonerGrammarObject:
    """Anything goes until `b a`, then the grammar."""
    found = ReasonerGrammarObject(grammar_of(regex), [B, A])
    found.maybe_init_reasoning(True)
    return found


def request(grammar: Any, output: tuple[int, ...] = (), open_token_at: int | None = None) -> Any:
    """One whose grammar has read its output, as SGLang has it."""
    for token in output:
        grammar.accept_token(token)
    open_token = OpenToken()
    open_token.begin(open_token_at)
    return SimpleNamespace(
        grammar=grammar,
        output_ids=list(output),
        smc_state=SimpleNamespace(open_token=open_token, kept={}),
        to_finish=None,
        rid="a",
        vocab_size=VOCAB,
        finished=lambda: False,
    )


def population(
    *tails: list[int], last_emitted: list[int] | None = None, **changes: Any
) -> Population:
    """One group."""
    return population_of([list(tails)], last_emitted and [last_emitted], width=8, **changes)


def legal(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def masks(req: Any, of: Population | None) -> Grammar:
    return Grammar(BatchTexts([req], of, VOCAB, "cpu"))


def along(of: Grammar, chains: torch.Tensor) -> torch.Tensor:
    """What may follow the first 0, 1, ..., J drafted tokens, ``[N, J + 1, V]``."""
    return of.allowed(chains, 0)[0]


def after(of: Grammar, chains: torch.Tensor) -> torch.Tensor:
    """What may follow all of them, ``[N, V]``."""
    return of.allowed(chains, chains.shape[2])[0, :, 0]


def drafted(*chains: list[int]) -> torch.Tensor:
    return torch.tensor([list(chains)])


EVERYTHING = list(range(VOCAB))


def test_particles_go_their_own_ways_and_leave_the_requests_grammar_alone() -> None:
    req = request(grammar_of("ab(ca|b*c)"), (A,))
    found = masks(req, population([B], [B, B], [B, B]))
    assert [legal(mask) for mask in after(found, drafted([], [], []).long())] == [
        *([B, C], [B, C], [B, C])
    ]
    chains = drafted([C, A], [B, C], [C, EOS])
    of_chains = along(found, chains)
    assert [legal(mask) for mask in of_chains[0]] == [[B, C], [A, EOS], [EOS]]
    assert [legal(mask) for mask in of_chains[1]] == [[B, C], [B, C], [EOS]]
    assert [legal(mask) for mask in of_chains[2]] == [[B, C], [EOS], EVERYTHING]
    assert [legal(mask) for mask in after(found, chains[:, :, :1])] == [*([A, EOS], [B, C], [EOS])]
    assert req.grammar.accepted_tokens == [A]
    assert not req.grammar.is_terminated()


def test_who_weighs_nothing_and_who_has_ended_may_say_anything() -> None:
    """A dead particle's tail may hold what no grammar has ever read, so nobody reads it."""
    req = request(grammar_of("ab*"), (A,))
    of = population(
        [B, VOCAB - 1],
        [EOS],
        [B],
        log_weights=torch.tensor([[-torch.inf, 0.0, 0.0]]).double(),
        ended=torch.tensor([[False, True, False]]),
    )
    found = along(masks(req, of), drafted([A], [A], [B]))
    assert [legal(mask[0]) for mask in found] == [EVERYTHING, EVERYTHING, [B, EOS]]


def test_a_token_that_is_illegal_ends_the_reading() -> None:
    """One beyond the tokenizer's own vocabulary would end the process in xgrammar."""
    found = masks(request(grammar_of("a*")), population([], []))
    of_chains = along(found, drafted([VOCAB - 1, A], [B, A]))
    assert all(legal(mask) == EVERYTHING for mask in of_chains[:, 1:].flatten(0, 1))


def test_an_open_first_token_is_each_particles_own() -> None:
    """The request's grammar has read the stand-in, which may even have ended its text."""
    for stand_in in (A, EOS):
        req = request(grammar_of("(ab|ba)?"), (stand_in,), open_token_at=0)
        found = masks(req, population([], [], [A], last_emitted=[A, B, B]))
        mask = along(found, drafted([], [], []).long())[:, 0]
        assert [legal(one) for one in mask] == [[B], [A], [EOS]]


def test_thinking_is_free_until_its_end() -> None:
    req = request(thinking("a*c"), (C,))
    found = along(masks(req, population([], [B], [B, A])), drafted([EOS], [A], [A]))
    assert [legal(mask) for mask in found[0]] == [EVERYTHING, EVERYTHING]
    assert [legal(mask) for mask in found[1]] == [EVERYTHING, [A, C]]
    assert [legal(mask) for mask in found[2]] == [[A, C], [A, C]]
    assert req.grammar._is_thinking()
    # What the particles read has gone by the request's own grammar; and a token can be taken back.
    twin = forked(req.grammar)
    twin.accept_token(B)
    twin.rollback(1)
    twin.accept_token(B)
    twin.accept_token(A)
    assert not twin._is_thinking() and req.grammar._thinking_match_history == [0]


def test_copies_share_nothing_that_reading_changes() -> None:
    grammar = thinking("a*c")
    twin = vars(forked(grammar))
    lists = {name: value for name, value in vars(grammar).items() if isinstance(value, list)}
    assert "_thinking_match_history" in lists
    assert [name for name, value in lists.items() if twin[name] is value] == []


def test_only_requests_with_a_grammar_are_masked() -> None:
    plain, bound = request(None), request(grammar_of("a"))
    assert [Grammar.applies(req) for req in (plain, bound)] == [False, True]
    both = Grammar(BatchTexts([plain, bound], None, VOCAB, "cpu"))
    nothing = torch.empty(2, 1, 0, dtype=torch.int64)
    assert [legal(mask[0, 0]) for mask in both.allowed(nothing, 0)] == [EVERYTHING, [A]]


def test_only_xgrammars_states_are_copied() -> None:
    with pytest.raises(TypeError, match="BaseGrammarObject"):
        forked(BaseGrammarObject())


def test_the_end_of_a_grammar_is_an_end() -> None:
    """With `ignore_eos` nothing else says so. EOS is none while thinking, nor where illegal."""
    bound, thinks = request(grammar_of("ab?")), request(thinking("a"))
    tokens = drafted([A, EOS], [EOS, EOS], [A, B])
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    found = masks(bound, None).ends(nothing, tokens, population([], [A], [A]))
    assert found.tolist() == [[[False, True], [True, False], [False, False]]]
    found = masks(thinks, None).ends(nothing, tokens, population([], [B, A, A], []))
    assert found.tolist() == [[[False, False], [True, False], [False, False]]]
    found = masks(bound, None).ends(nothing[:, :1], drafted([A, EOS]), None)
    assert found.tolist() == [[[False, True]]]


def played(req: Any, seconds_each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of two particles, three tokens each, in which a mask takes so long."""
    clock = [0.0]
    fill = XGrammarGrammar.fill_vocab_mask

    def slow(grammar: XGrammarGrammar, *args: Any) -> None:
        clock[0] += seconds_each
        fill(grammar, *args)

    monkeypatch.setattr(module.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(XGrammarGrammar, "fill_vocab_mask", slow)
    of = Grammar.of(BatchTexts([req], population([], []), VOCAB, "cpu"))
    of.allowed(drafted([A, A, B], [B, A, A]), 0)
    monkeypatch.undo()


@pytest.mark.parametrize(("seconds_each", "ends"), [(1e-4, False), (0.03, False), (0.06, True)])
def test_a_grammar_that_takes_too_long_ends_its_request_before_the_next_round(
    seconds_each: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven texts: 0.42 s are too long, 0.21 s are not."""
    req = request(grammar_of("(a|b)*"))
    played(req, seconds_each, monkeypatch)
    played(req, 0.0, monkeypatch)
    assert (req.to_finish is not None) == ends == (req.grammar is None)
    if ends:
        assert req.to_finish.status_code == 400
        assert "0.42 s" in req.to_finish.message and "60.0 ms" in req.to_finish.message
    played(req, 0.0, monkeypatch)  # a round that has begun goes on without it


def test_pythons_garbage_is_not_a_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where a collection that falls into a round ends the request that it fell on."""
    clock, num_texts = [0.0], [0]
    fill = XGrammarGrammar.fill_vocab_mask

    def collected(phase: str, info: dict[str, int]) -> None:
        clock[0] += 0.6 if phase == "stop" else 0.0

    def littered(grammar: XGrammarGrammar, *args: Any) -> None:
        gc.collect()
        num_texts[0] += 1
        fill(grammar, *args)

    monkeypatch.setattr(module.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(XGrammarGrammar, "fill_vocab_mask", littered)
    req, before = request(grammar_of("(a|b)*")), [*gc.callbacks, collected]
    gc.callbacks.append(collected)
    try:
        for _ in range(2):
            Grammar.of(BatchTexts([req], None, VOCAB, "cpu"))
        assert num_texts == [2] and clock[0] >= 1.2
        assert req.to_finish is None
        assert gc.callbacks == before
    finally:
        gc.callbacks.remove(collected)


def test_ranks_end_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where each goes by its own clock: they would wait for one another for ever."""
    group = SimpleNamespace(world_size=2, cpu_group="cpu")
    monkeypatch.setattr(module.parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(module.parallel_state, "get_tp_group", lambda: group)

    def other_rank_is_slow(flags: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX and group == "cpu"
        flags[1] = 1

    monkeypatch.setattr(torch.distributed, "all_reduce", other_rank_is_slow)
    reqs = [request(grammar_of("a*")), request(grammar_of("a*"))]
    Grammar.of(BatchTexts(reqs, None, VOCAB, "cpu"))
    assert [req.grammar is None for req in reqs] == [False, True]


def test_only_so_many_grammars_are_kept_and_the_least_recently_used_goes_first(
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
