"""Compute the distribution of short texts from models' next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sglang_smc.tools.testing.model import Answer, Model
from sglang_smc.tools.testing.statistics import Text

Law = dict[Text, float]
"""Prefix -> mass of the texts of which it is the longest prefix here. The sum may be below 1."""


def short_law(models: Sequence[Model], prompt: Text, smallest: float) -> Law:
    """Return the distribution of texts after a prompt, the i-th token sampled from the i-th model.

    Prefixes with a mass of at least ``smallest`` are extended; the remaining mass of a prefix,
    that of its rarer tokens, is the mass of the prefix itself.
    """
    law: Law = {}
    frontier: Law = {(): 1.0}
    for model in models:
        prefixes = list(frontier)
        longer: Law = {}
        tops = model.following([(*prompt, *prefix) for prefix in prefixes])
        for prefix, top in zip(prefixes, tops, strict=True):
            mass = frontier[prefix]
            common = {
                (*prefix, token): mass * math.exp(logprob)
                for token, logprob in top.items()
                if mass * math.exp(logprob) >= smallest
            }
            longer |= common
            law[prefix] = max(0.0, mass - math.fsum(common.values()))
        frontier = longer
    return law | frontier


def claimed_law(target: Model, prompt: Text, answers: Iterable[Answer]) -> Law:
    """Return the distribution of one-particle, one-round answers that their weights imply.

    The evidence of such an answer is p over the probability with which it was sampled.
    """
    evidence = {answer.text: answer.log_evidence for answer in answers}
    scored = target.score([prompt] * len(evidence), list(evidence))
    return {
        text: math.exp(math.fsum(position.logprob for position in positions) - log_evidence)
        for (text, log_evidence), positions in zip(evidence.items(), scored, strict=True)
    }
