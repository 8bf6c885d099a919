"""Plays a trace by its own fields, and holds each against what the others say."""

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
from scipy.special import logsumexp

from sglang_smc.state.trace import Trace, TracedRound
from sglang_smc_tools.view.finding import checked


class Replayed(NamedTuple):
    output_ids: list[int]  # that were emitted
    particles: list[list[int]]  # their texts as they stood before the last narrowing
    log_weights: list[float]  # of these, up to what bonus tokens added
    log_evidence: float  # with what weights have gained, up to what first tokens added
    texts: list[list[int]]  # of the particles as the record ends
    scores: dict[tuple[int, ...], float]  # what potentials added to the weights of texts


def read(meta_info: dict[str, Any]) -> Trace:
    """The trace of an answer; raises where it is none."""
    return checked(meta_info["spec_smc_trace"])


def replay(trace: Trace, *, is_plain: bool = True, tolerance: float = 1e-6) -> Replayed:
    """Play all rounds.

    Args:
        is_plain: for the target itself: bonus tokens, and first ones, weigh nothing.
        tolerance: of all numbers.
    """
    state = Replay(is_plain and trace.mode == "smc", tolerance)
    for traced in trace.rounds:
        state.play(traced, weighs=trace.mode == "smc")
    state.emitted += trace.emitted_after
    weighed = state.particles, state.weights, state.log_evidence
    return Replayed(state.emitted, *weighed, state.texts, state.scores)


class Replay:
    """Particles as a reader of the trace knows them."""

    def __init__(self, is_plain: bool, tolerance: float) -> None:
        self.is_plain = is_plain
        self.near = partial(pytest.approx, abs=tolerance)
        self.emitted: list[int] = []
        self.texts: list[list[int]] = []
        self.scores: dict[tuple[int, ...], float] = {}
        self.ended: list[bool] = []
        self.particles: list[list[int]] = []
        self.weights: list[float] = []  # before the last narrowing
        self.after: list[float] = []
        self.banked = 0.0
        self.offset: float | None = 0.0 if is_plain else None

    def play(self, traced: TracedRound, *, weighs: bool) -> None:
        self.begin(traced)
        num_particles = len(traced.ancestors)
        before = as_floats(traced.log_weights_before)
        weighed = as_floats(traced.log_weights)
        assert before == self.near(self.after), "weights are those of the round before"
        if weighs:
            assert traced.ess == self.near(ess_of(weighed))
        added = as_floats(traced.log_potentials or [0.0] * num_particles)
        judged = [old + new for old, new in zip(before, added, strict=True)]
        self.scores |= {tuple(t): new for t, new in zip(self.texts, added, strict=True) if new}
        gain = log_mean(weighed) - log_mean(judged)
        assert (traced.log_block_evidence or 0.0) == self.near(gain)
        self.check_ended(traced)
        self.extend(traced, weighs=weighs)
        if weighs:
            pairs = zip(traced.kept, traced.drafted, strict=True)
            assert all(count <= len(tokens) for count, tokens in pairs)
        self.weights = [0.0] * num_particles if traced.resampled else weighed
        self.banked += log_mean(weighed) if traced.resampled else 0.0
        self.narrow(traced)
        if weighs:
            self.check_evidence(traced)

    def begin(self, traced: TracedRound) -> None:
        if traced.begins is not None:
            assert traced.resized_from is None
            # What a retraction drops has been counted as it stood, and all weigh the same anew.
            self.banked = self.log_evidence
            self.emitted = [*self.emitted, *traced.emitted_before]
            begun = [[*self.emitted, token] for token in traced.begins]
            self.texts = begun
            self.after = [0.0] * len(begun)
            self.ended = []  # a first token may be the last, which only its reader can tell
            if len(set(traced.begins)) == 1:
                self.emitted = [*begun[0]]
        if traced.resized_from is not None:
            self.banked = self.log_evidence
            self.texts = [self.texts[who] for who in traced.resized_from]
            self.after = [0.0] * len(self.texts)
            self.ended = [self.ended[who] for who in traced.resized_from] if self.ended else []

    def check_ended(self, traced: TracedRound) -> None:
        """Nothing is drafted for texts that have ended, and something for all others."""
        if self.ended and any(traced.drafted):
            assert self.ended == [not tokens for tokens in traced.drafted]
        assert all(traced.ended[i] for i, token in enumerate(traced.bonus) if token is None)
        self.ended = traced.ended

    def extend(self, traced: TracedRound, *, weighs: bool) -> None:
        kept = traced.kept
        each = zip(self.texts, traced.drafted, kept, strict=True)
        drafted = [[*text, *tokens[:count]] for text, tokens, count in each]
        whole = [count >= len(tokens) for count, tokens in zip(kept, traced.drafted, strict=True)]
        # In rounds that verify the winner alone goes on.
        keeps_all = all(whole) if weighs else all(whole[who] for who in traced.ancestors)
        assert (traced.cut == "none") == keeps_all
        handed = [drafted[who] for who in traced.ancestors]
        assert all(len(traced.drafted[who]) >= kept[who] for who in traced.ancestors)
        pairs = zip(handed, traced.bonus, strict=True)
        self.texts = [text if token is None else [*text, token] for text, token in pairs]
        self.particles = self.texts

    def narrow(self, traced: TracedRound) -> None:
        """Who is left, with what weights, and what all of them say."""
        self.after = as_floats(traced.log_weights_after)
        if traced.narrowed_to is not None:
            self.texts = [self.texts[who] for who in traced.narrowed_to]
            self.ended = [self.ended[who] for who in traced.narrowed_to]
            assert self.particles != self.texts or len(set(map(tuple, self.texts))) == 1
        elif self.is_plain:
            assert self.after == self.near(self.weights)
        if self.is_plain:
            assert log_mean(self.after) == self.near(log_mean(self.weights))
        self.emitted = [*self.emitted, *traced.emitted]
        shared = common(self.texts)
        # With potentials the last token of texts that have all ended waits for their values.
        waits = traced.log_potentials is not None and all(self.ended)
        assert self.emitted in (shared, shared[:-1] if waits else shared), "what they share"

    def check_evidence(self, traced: TracedRound) -> None:
        """What weights have gained is in the estimate, from the first round to the last."""
        if traced.log_evidence is None:
            return
        if self.offset is None:
            self.offset = traced.log_evidence - self.log_evidence
        assert traced.log_evidence == self.near(self.log_evidence + self.offset)

    @property
    def log_evidence(self) -> float:
        return self.banked + (log_mean(self.after) if self.after else 0.0)


def as_floats(values: list[float | None]) -> list[float]:
    return [-math.inf if value is None else value for value in values]


def log_mean(values: list[float]) -> float:
    return float(logsumexp(values)) - math.log(len(values))


def ess_of(log_weights: list[float]) -> float:
    doubled = [2 * value for value in log_weights]
    return math.exp(2 * logsumexp(log_weights) - logsumexp(doubled))


def common(texts: list[list[int]]) -> list[int]:
    columns = zip(*texts, strict=False)
    agreed = [len(set(column)) == 1 for column in columns]
    return texts[0][: [*agreed, False].index(False)]
