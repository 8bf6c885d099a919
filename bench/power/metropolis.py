"""Sample from a power of a model by Metropolis-Hastings over a plain server (Karan and Du, 2025).

A text grows by blocks. After each, a step draws a position, samples anew what follows it at the
temperature 1 / power, and accepts that by the ratio of its probability under p^power to that of
being proposed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

#: Tokens of a block, and steps after each.
BLOCK = 32
STEPS = 3
SEEDS = 1 << 31
#: Tokens whose p^power are summed for its normaliser; at 2 the others add less than 1 / LIKELIEST.
LIKELIEST = 64


class PlainServer(Protocol):
    """Answers requests of /generate with log-probabilities at temperature 1."""

    def generate(self, **question: Any) -> Any: ...


class Token(NamedTuple):
    """A token with its log-probabilities, in nats, given those before."""

    id: int
    log_p: float  # under the model
    log_q: float  # as it is proposed, at the temperature 1 / power


class ChainText(NamedTuple):
    """A text of a chain."""

    tokens: list[Token]
    has_ended: bool  # by EOS

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Chain:
    """A chain of texts after a prompt.

    Attributes:
        passes: of the model, one a sampled token.
        proposed, accepted: steps.
    """

    def __init__(self, engine: PlainServer, prompt: list[int], power: float, seed: int) -> None:
        self._engine = engine
        self._prompt = prompt
        self._power = power
        self._draw = random.Random(seed)
        self.text = ChainText([], has_ended=False)
        self.passes = 0
        self.proposed = 0
        self.accepted = 0

    def run(self, most: int) -> ChainText:
        """Return the last text, of at most ``most`` tokens."""
        for end in [*range(BLOCK, most, BLOCK), most]:
            if self.text.has_ended:
                break
            self.text = self._continued(len(self.text.tokens), end)
            for _ in range(STEPS):
                self._step(end)
        return self.text

    def _step(self, end: int) -> None:
        kept = self._draw.randrange(len(self.text.tokens))
        proposed = self._continued(kept, end)
        self.proposed += 1
        log_ratio = self._log_weight(proposed, kept) - self._log_weight(self.text, kept)
        if math.log1p(-self._draw.random()) < log_ratio:
            self.text = proposed
            self.accepted += 1

    def _log_weight(self, text: ChainText, kept: int) -> float:
        """Return log p^power of what follows ``kept`` tokens, minus that of being proposed.

        A text of T tokens has its position ``kept`` drawn with probability 1 / T.
        """
        after = text.tokens[kept:]
        of_tokens = sum(self._power * token.log_p - token.log_q for token in after)
        return of_tokens - math.log(len(text.tokens))

    def _continued(self, kept: int, end: int) -> ChainText:
        """Return the text's first ``kept`` tokens and others, sampled, up to ``end`` or EOS."""
        begun = self.text.tokens[:kept]
        told = self._engine.generate(
            input_ids=[*self._prompt, *(token.id for token in begun)],
            sampling_params={
                "temperature": 1 / self._power,
                "max_new_tokens": end - kept,
                "sampling_seed": self._draw.randrange(SEEDS),
            },
            return_logprob=True,
            top_logprobs_num=LIKELIEST,
        )
        info = told["meta_info"]
        each = zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True)
        tokens = [self._token(*one) for one in each]
        self.passes += len(tokens)
        return ChainText([*begun, *tokens], info["finish_reason"]["type"] == "stop")

    def _token(self, sampled: Sequence[Any], likeliest: Sequence[Sequence[Any]]) -> Token:
        """Return a token by what a server tells: log p and id, of the likeliest, too."""
        log_p, token, *_ = sampled
        log_normaliser = math.log(sum(math.exp(self._power * one[0]) for one in likeliest))
        return Token(token, log_p, self._power * log_p - log_normaliser)
