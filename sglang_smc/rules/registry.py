"""List all rules, and combine those of a batch.

A new rule takes one file with a `LogitsRule` or a `Scorer`, and one entry in `RULES`.
"""

import math
from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.kv.transfer import to_device
from sglang_smc.rules.base import BatchTexts, GroupScores, LogitsRule, Rule, Scorer
from sglang_smc.rules.grammar import Grammar
from sglang_smc.rules.potentials import Potentials
from sglang_smc.rules.processors import Processors
from sglang_smc.rules.stopping import StopTexts
from sglang_smc.smc.population import Population, Scores
from sglang_smc.state import failures
from sglang_smc.state.request import find_state, state_of

RULES: tuple[type[Rule], ...] = (Processors, Grammar, StopTexts, Potentials)
"""All rules, in the order in which they are applied."""


def has_rules(req: Req) -> bool:
    return any(rule.applies(req) for rule in RULES)


def has_scorers(req: Req) -> bool:
    """Return whether a request has potentials."""
    return any(issubclass(rule, Scorer) and rule.applies(req) for rule in RULES)


def needs_host(req: Req) -> bool:
    """Return whether rounds of a request need its tokens on the host."""
    state = find_state(req)
    return (state is not None and state.config.uses_matches) or has_rules(req)


class TextRules:
    """The rules of one batch; empty where no request has one.

    Args:
        reqs: the batch.
        rules: made for this round, in the order of `RULES`.
    """

    def __init__(self, reqs: Sequence[Req], rules: tuple[Rule, ...]) -> None:
        self._reqs = reqs
        self._logits_rules = [rule for rule in rules if isinstance(rule, LogitsRule)]
        self._scorers = [rule for rule in rules if isinstance(rule, Scorer)]

    @classmethod
    def of(
        cls,
        reqs: list[Req],
        population: Population | None,
        vocab_size: int,
        device: torch.device | str,
    ) -> "TextRules":
        """Return the rules of a round or a prefill; arguments as in `BatchTexts`."""
        texts = BatchTexts(reqs, population, vocab_size, device)
        present = (rule for rule in RULES if any(map(rule.applies, reqs)))
        return cls(reqs, tuple(rule(texts) for rule in present))

    @property
    def is_empty(self) -> bool:
        return not (self._logits_rules or self._scorers)

    @classmethod
    def begin(cls, reqs: list[Req], vocab_size: int, device: torch.device | str) -> "TextRules":
        """Return the rules of a prefill, after each has stored what its rounds will need."""
        for req in reqs:
            for rule in RULES:
                if rule.applies(req):
                    rule.begin(req)
        return cls.of(reqs, None, vocab_size, device)

    def apply(
        self, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply all rules to logits; return these and the joint mask; shapes as in `LogitsRule`."""
        allowed: torch.Tensor | None = None
        for rule in self._logits_rules:
            logits = rule.edit(logits, chains, first)
            mask = rule.allowed(chains, first)
            if mask is not None:
                allowed = mask if allowed is None else allowed & mask
        return logits, allowed

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Return where sequences end ``[G, N, C]``: at ``ends``, or where a rule finds an end."""
        for rule in self._logits_rules:
            ends = rule.ends(ends, tokens, population)
        return ends

    def scores(self, like: torch.Tensor) -> Scores:
        """Return the joint values of the sequences that a round starts from; see `Scores`.

        Args:
            like: ``[G, N]``, on the device of the result.
        """
        size = (len(self._reqs), like.shape[1])
        nothing = GroupScores.none(like.shape[1])
        log_values = torch.full(size, math.nan, dtype=torch.float64, device="cpu")
        complete = torch.ones(size, dtype=torch.bool, device="cpu")
        for scorer in self._scorers:
            found = scorer.result()
            for group in (group for group, req in enumerate(self._reqs) if scorer.applies(req)):
                own = found.get(group, nothing)
                for particle, value in enumerate(own.log_values):
                    if value is not None:
                        log_values[group, particle] = value
                complete[group] &= torch.tensor(own.complete, device="cpu")
        return Scores(to_device(like.device, log_values), to_device(like.device, complete))

    def note_first(self, tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
        for rule in self._logits_rules:
            rule.note_first(tokens, log_sums)


def end_stuck(req: Req) -> bool:
    """End a request without any particle of positive weight, if some rule can be the cause."""
    causes = [rule for rule in (Grammar, Potentials) if rule.applies(req)]
    for rule in causes:
        rule.end_stuck(req)
    return bool(causes)


def end_failed(req: Req, code: int) -> bool:
    """End a request with a failure code other than 0; return whether a model is the cause."""
    if code and Processors.end_without_token(req):
        return False
    return failures.end_failed(req, code)


def close_token(req: Req, token: int) -> None:
    """Replace the open token, in SGLang's request fields and in the grammar's state."""
    state_of(req).open_token.close(req, token)
    Grammar.reread(req, 1, [token])


def withdraw_token(req: Req) -> None:
    """Withdraw an open token, so that the next prefill does not process it."""
    Grammar.reread(req, state_of(req).open_token.withdraw(req), [])
