"""List all rules, and combine those of a batch.

A new rule takes one file with a `TextRule`, and one entry in `RULES`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_smc.kv.transfer import on_device
from sglang_smc.rules.base import BatchTexts, TextRule, Verdict
from sglang_smc.rules.grammar import Grammar
from sglang_smc.rules.potentials import Potentials, Votes
from sglang_smc.rules.processors import Processors
from sglang_smc.rules.stopping import StopTexts
from sglang_smc.state.population import Judged, Population
from sglang_smc.state.request import find_state, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RULES: tuple[type[TextRule], ...] = (Processors, Grammar, StopTexts, Potentials, Votes)
"""All rules, in the order in which they are applied."""


def rules_of_request(req: "Req") -> tuple[type[TextRule], ...]:
    """Return the rules that one request has."""
    return tuple(rule for rule in RULES if rule.applies(req))


def has_rules(req: "Req") -> bool:
    """Return whether a request has any rule."""
    return any(rule.applies(req) for rule in RULES)


def has_scorers(req: "Req") -> bool:
    """Return whether a request has potentials or a majority vote."""
    return any(rule.judges and rule.applies(req) for rule in RULES)


def needs_host(req: "Req") -> bool:
    """Return whether rounds of a request need its tokens on the host."""
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
        """Return the rules of a round or a prefill."""
        chosen = (rule for rule in RULES if any(map(rule.applies, texts.reqs)))
        return cls(tuple(rule.of(texts) for rule in chosen))

    @property
    def is_empty(self) -> bool:
        """Return whether no request has a rule."""
        return not self._rules

    @classmethod
    def begin(cls, texts: BatchTexts) -> "TextRules":
        """Return the rules of a prefill, after each has stored what its rounds will need."""
        for req in texts.reqs:
            for rule in rules_of_request(req):
                rule.begin(req)
        return cls.of(texts)

    def apply(
        self, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply all rules to logits; return these and the joint mask; shapes as in `TextRule`."""
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
        """Return where sequences end ``[G, N, C]``: at ``ends``, or where a rule finds an end."""
        for rule in self._rules:
            ends = rule.ends(ends, tokens, population)
        return ends

    def judged(self, reqs: "Sequence[Req]", like: torch.Tensor) -> Judged:
        """Return the joint results for the sequences that a round starts from.

        Args:
            reqs: of the round.
            like: ``[G, N]``, on the device of the result.
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
        """Pass the tokens sampled at prefill to all rules; see `TextRule.note_first`."""
        for rule in self._rules:
            rule.note_first(tokens, log_sums)


def _joined(
    verdicts: list[Verdict], num_particles: int
) -> tuple[list[float], list[bool], list[int]]:
    """Return one request's row of `Judged`, from the results of its rules."""
    log_values, complete = [math.nan] * num_particles, [True] * num_particles
    answers = [-1] * num_particles
    for said in verdicts:
        both = zip(log_values, said.log_values, strict=True)
        log_values = [old if new is None else new for old, new in both]
        complete = [a and b for a, b in zip(complete, said.complete, strict=True)]
        answers = answers if said.answers is None else said.answers
    return log_values, complete, answers


def judge_first(req: "Req") -> None:
    """End a request at the token sampled at prefill, if some rule found an end there."""
    for rule in RULES:
        rule.judge_first(req)


def judge(req: "Req") -> None:
    """End a request if some rule finds an end in its settled output.

    SGLang has checked the output before.
    """
    for rule in rules_of_request(req):
        rule.judge(req)


def leave(req: "Req") -> None:
    """Disable SGLang's own checks of rules, in a request that generates nothing."""
    for rule in rules_of_request(req):
        rule.leave(req)


def forget(req: "Req") -> None:
    """Release the rules' state of a request that is about to end."""
    for rule in rules_of_request(req):
        rule.forget(req)


def end_stuck(req: "Req") -> bool:
    """End a request without any particle of positive weight, if some rule can be the cause."""
    ended = [rule.end_stuck(req) for rule in rules_of_request(req)]
    return any(ended)


def settle(req: "Req", token: int, logprob: float | None) -> None:
    """Settle the open token, in SGLang's request fields and in the rules' state."""
    state_of(req).open_token.settle(req, token, logprob)
    _reread(req, 1, [token])


def withdraw(req: "Req") -> None:
    """Withdraw an open token, so that the next prefill does not process it."""
    num_dropped = state_of(req).open_token.withdraw(req)
    _reread(req, num_dropped, [])


def _reread(req: "Req", num_dropped: int, tokens: list[int]) -> None:
    if num_dropped or tokens:
        for rule in rules_of_request(req):
            rule.reread(req, num_dropped, tokens)
