"""All rules that texts obey, and what they come to together.

A new rule is one file with a `TextRule`, and one word in `RULES`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_smc.requests.grammar import Grammar
from sglang_smc.requests.potentials import Potentials
from sglang_smc.requests.processors import Processors
from sglang_smc.requests.state import find_state, state_of
from sglang_smc.requests.stopping import StopTexts
from sglang_smc.requests.text_rule import BatchTexts, TextRule, Verdict
from sglang_smc.requests.votes import Votes
from sglang_smc.state.judged import Judged
from sglang_smc.state.population import Population
from sglang_smc.state.transfer import on_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RULES: tuple[type[TextRule], ...] = (Processors, Grammar, StopTexts, Potentials, Votes)
"""All rules, in the order in which they act."""


def rules_of_request(req: "Req") -> tuple[type[TextRule], ...]:
    """The rules that one request has."""
    return tuple(rule for rule in RULES if rule.applies(req))


def has_rules(req: "Req") -> bool:
    """Whether a request has any rule."""
    return any(rule.applies(req) for rule in RULES)


def has_judges(req: "Req") -> bool:
    """Whether some rule of a request says what its texts are worth, or what they answer."""
    return any(rule.judges and rule.applies(req) for rule in RULES)


def needs_host(req: "Req") -> bool:
    """Whether rounds of a request wait until the host knows its text."""
    state = find_state(req)
    if state is not None and state.config.uses_matches:
        return True
    return any(rule.needs_host and rule.applies(req) for rule in RULES)


class TextRules:
    """The rules of one batch; empty where no request has one.

    Args:
        rules: made for this round, in the order of `RULES`.
    """

    def __init__(self, rules: tuple[TextRule, ...] = ()) -> None:
        self._rules = rules

    @classmethod
    def of(cls, texts: BatchTexts) -> "TextRules":
        """The rules of a round or a prefill."""
        chosen = (rule for rule in RULES if any(map(rule.applies, texts.reqs)))
        return cls(tuple(rule.of(texts) for rule in chosen))

    @property
    def is_empty(self) -> bool:
        """Whether nobody has a rule."""
        return not self._rules

    @classmethod
    def begin(cls, texts: BatchTexts) -> "TextRules":
        """The rules of a prefill, which note what the requests' rounds will need."""
        for req in texts.reqs:
            for rule in rules_of_request(req):
                rule.begin(req)
        return cls.of(texts)

    def apply(
        self, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits as all rules leave them, and what all of them allow; shapes as in `TextRule`."""
        allowed: torch.Tensor | None = None
        for rule in self._rules:
            logits = rule.edit(logits, chains, first)
            mask = rule.allowed(chains, first)
            if mask is not None:
                allowed = mask if allowed is None else allowed & mask
        return logits, allowed

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Where texts end ``[G, N, C]``: at ``ends``, or where a rule says so."""
        for rule in self._rules:
            ends = rule.ends(ends, tokens, population)
        return ends

    def judged(self, reqs: "Sequence[Req]", like: torch.Tensor) -> Judged:
        """What all rules that judge say of the texts that a round starts from.

        Args:
            reqs: of the round.
            like: ``[G, N]``, on the device that it is wanted on.
        """
        found = [(rule, rule.verdicts()) for rule in self._rules if rule.judges]
        nothing = Verdict.none(like.shape[1])
        joined = [
            _joined(
                [said.get(group, nothing) for rule, said in found if rule.applies(req)],
                like.shape[1],
            )
            for group, req in enumerate(reqs)
        ]
        log_values, complete, answers = (list(column) for column in zip(*joined, strict=True))
        return Judged(
            on_device(like.device, log_values, torch.float64),
            on_device(like.device, complete),
            on_device(like.device, answers),
        )

    def note_first(self, tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Tell all rules of a prefill's draws; see `TextRule.note_first`."""
        for rule in self._rules:
            rule.note_first(tokens, log_sums)


def _joined(
    verdicts: list[Verdict], num_particles: int
) -> tuple[list[float], list[bool], list[int]]:
    """One request's row of `Judged`, from what those who judge it say."""
    log_values, complete = [math.nan] * num_particles, [True] * num_particles
    answers = [-1] * num_particles
    for said in verdicts:
        both = zip(log_values, said.log_values, strict=True)
        log_values = [old if new is None else new for old, new in both]
        complete = [a and b for a, b in zip(complete, said.complete, strict=True)]
        answers = answers if said.answers is None else said.answers
    return log_values, complete, answers


def judge_first(req: "Req") -> None:
    """End a request at the token that prefill drew, where some rule noted so."""
    for rule in RULES:
        rule.judge_first(req)


def judge(req: "Req") -> None:
    """End a request in whose settled text some rule finds an end, after SGLang has looked."""
    for rule in rules_of_request(req):
        rule.judge(req)


def leave(req: "Req") -> None:
    """Have SGLang not look for what a rule knows, in a request that generates nothing."""
    for rule in rules_of_request(req):
        rule.leave(req)


def forget(req: "Req") -> None:
    """Have no rule read on in a request that is about to end."""
    for rule in rules_of_request(req):
        rule.forget(req)


def end_stuck(req: "Req") -> bool:
    """End a request whose particles all weigh nothing, if some rule can be the cause."""
    ended = [rule.end_stuck(req) for rule in rules_of_request(req)]
    return any(ended)


def settle(req: "Req", token: int, logprob: float | None) -> None:
    """Let all particles agree on the open token, in SGLang's books and in what rules have read."""
    state_of(req).open_token.settle(req, token, logprob)
    _reread(req, 1, [token])


def withdraw(req: "Req") -> None:
    """Take an open token back, so that the next prefill does not read it."""
    num_dropped = state_of(req).open_token.withdraw(req)
    _reread(req, num_dropped, [])


def _reread(req: "Req", num_dropped: int, tokens: list[int]) -> None:
    if num_dropped or tokens:
        for rule in rules_of_request(req):
            rule.reread(req, num_dropped, tokens)
