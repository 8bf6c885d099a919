"""Tensor-parallel ranks end the same requests whatever their clocks say, and tell if they part."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_ranks import FakeRanks
from populations import population_of
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from toy_request import ToyRequest
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials import Potential, Text
from sglang_smc.potentials.calls import Caller
from sglang_smc.potentials.declared import choose
from sglang_smc.requests.grammar import Grammar
from sglang_smc.requests.potentials import Potentials
from sglang_smc.requests.state import RequestState
from sglang_smc.requests.text_rule import BatchTexts
from sglang_smc.requests.votes import Votes
from sglang_smc.state.ranks import INTERVAL, RankCheck

VOCAB = 27
SLOW_FIRST, SLOW_SECOND = (3600.0, 0.0), (0.0, 3600.0)  # seconds that a look at the clock takes


@pytest.fixture(params=[SLOW_FIRST, SLOW_SECOND], ids=["first", "second"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    return FakeRanks(monkeypatch, request.param)


def request_of(smc: dict[str, Any], grammar: Any = None) -> Any:
    """A request with a state of its own, as each rank holds it."""
    found: Any = ToyRequest(1, VOCAB, 8, {}, grammar)
    found.output_ids = [0]
    found.smc_state = RequestState.of(0, request_config(SMCConfig(), {"smc": smc}))
    return found


def batch_of(reqs: list[Any], tails: list[list[list[int]]]) -> BatchTexts:
    """All of whose particles have ended."""
    population = population_of(tails)
    return BatchTexts(reqs, population._replace(ended=population.ended | True), VOCAB, "cpu")


def test_votes(ranks: FakeRanks) -> None:
    """Red where a clock bounds the search: going back, this one takes 60^5 steps."""
    smc = {"selection": "vote", "answer_pattern": "(.*?.*?.*?.*?.*?[yz]|a)"}

    def of_rank(rank: int) -> Any:
        req = request_of(smc)
        verdict = Votes.of(batch_of([req], [[[1, 0] * 30, [1]]])).verdicts()[0]
        return verdict.answers, req.to_finish

    assert ranks.run(of_rank) == [([0, 0], None)] * 2


def test_grammars(ranks: FakeRanks) -> None:
    """Both ranks end it, in the round behind the one that was slow on one of them."""
    compiled = GrammarCompiler(
        TokenizerInfo(["a", "b", "</s>"], vocab_size=VOCAB, stop_token_ids=[2])
    ).compile_regex("(a|b)*")

    def of_rank(rank: int) -> list[bool]:
        grammar = XGrammarGrammar(GrammarMatcher(compiled), VOCAB, compiled, None, "(a|b)*")
        req = request_of({}, grammar)
        ended = []
        for _ in range(3):
            Grammar.of(BatchTexts([req], None, VOCAB, "cpu"))
            ended.append(req.to_finish is not None)
        return ended

    assert ranks.run(of_rank) == [[False, True, True]] * 2


class Stuck(Potential):
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        self.go.wait()
        return [1.0] * len(texts)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    potential = Stuck()
    yield potential
    potential.go.set()


def test_potentials(ranks: FakeRanks, stuck: Stuck) -> None:
    """The first rank alone asks: where its time is up, both end the request."""
    is_late = ranks.rank_seconds[0] > 0
    if not is_late:
        stuck.go.set()

    def of_rank(rank: int) -> Any:
        req = request_of({"potentials": [{"name": "stuck"}]})
        chosen = choose(req.smc_state.config.potentials[0], {"stuck": stuck})
        req.smc_state.potentials = (chosen,)
        req.smc_state.callers = (Caller("stuck", stuck, 600.0),)
        Potentials.begin(req)
        verdict = Potentials.of(batch_of([req], [[[1], [1, 1]]])).verdicts()[0]
        return verdict.log_values, req.to_finish and req.to_finish.status_code

    expected = ([None, None], 503) if is_late else ([1.0, 1.0], None)
    assert ranks.run(of_rank) == [expected] * 2


def emit(check: RankCheck, rounds: list[list[list[int]]]) -> None:
    for tokens in rounds:
        check.add(tokens)


def test_ranks_that_part_end_with_the_round_in_which_they_did(ranks: FakeRanks) -> None:
    alike = [[[round_, 1], [2]] for round_ in range(2 * INTERVAL)]
    assert ranks.run(lambda rank: emit(RankCheck(), alike)) == [None] * 2
    parted = [[[round_, 1], [3]] for round_ in range(2 * INTERVAL)]
    at = INTERVAL + 4
    theirs = [alike, alike[:at] + parted[at : at + 1] + alike[at + 1 :]]
    for error in ranks.run(lambda rank: emit(RankCheck(), theirs[rank])):
        assert isinstance(error, RuntimeError)
        assert f"in round {at + 1} since its start" in str(error)
        assert "--speculative-smc-round-graph off" in str(error)


def test_one_rank_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRanks(monkeypatch, (0.0,))
    check = RankCheck()
    emit(check, [[[1]]] * INTERVAL)
    assert not check._digests
