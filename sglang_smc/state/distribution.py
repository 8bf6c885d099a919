"""Next-token distributions of many draws, worked out only as far as somebody asks."""

from typing import NamedTuple

import torch

from sglang_smc.ops.interface import Ops
from sglang_smc.smc.proposal import of_each_draw, power_law, tempered


class TokenDistribution(NamedTuple):
    """What each of D draws is drawn from: logits over a temperature.

    Where rules cut tokens, the scores are log-probabilities already, and the temperature is 1.
    """

    scores: torch.Tensor  # [R, V], any float type
    temperature: torch.Tensor  # [G] float32, each of D / G draws one after another
    rows: torch.Tensor | None = None  # [D] the row of scores that each draw uses; None: D = R
    log_mass: torch.Tensor | None = None  # [R] log of what a grammar leaves of p; None: all of it

    @classmethod
    def of_log_probs(
        cls, log_p: torch.Tensor, rows: torch.Tensor | None = None
    ) -> "TokenDistribution":
        """From log-probabilities ``[R, V]``, whose rows may serve several draws."""
        return cls(log_p, torch.ones(1, device=log_p.device), rows)

    @property
    def num_draws(self) -> int:
        """D."""
        return len(self.scores if self.rows is None else self.rows)

    def of_rows(self, rows: torch.Tensor) -> "TokenDistribution":
        """The laws of some rows ``[D]``, as many of each group; nothing is copied."""
        assert self.rows is None
        return self._replace(rows=rows)

    def sample(self, ops: Ops, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probabilities, both of the shape of ``uniforms``, D in all."""
        tokens, log_p = ops.sample_and_score(
            self.scores, self.temperature, uniforms.flatten(), self.rows
        )
        return tokens.view_as(uniforms), log_p.view_as(uniforms)

    def score(self, ops: Ops, tokens: torch.Tensor) -> torch.Tensor:
        """What tokens weigh, D in all, in their shape: log p, before a grammar renormalises it."""
        log_p = ops.score_tokens(self.scores, self.temperature, tokens.flatten(), self.rows)
        if self.log_mass is not None:
            log_p = log_p + self.log_masses()
        return log_p.view_as(tokens)

    def log_probs(self) -> torch.Tensor:
        """All of them, ``[D, V]`` float32."""
        scores = self.scores if self.rows is None else self.scores[self.rows]
        return tempered(scores, of_each_draw(self.temperature, len(scores)))

    def to_power(self, power: torch.Tensor) -> tuple["TokenDistribution", torch.Tensor]:
        """p^alpha over its sum, and the log of the sum, for powers ``[D]``: what a draw weighs."""
        log_p, log_sum = power_law(self.log_probs(), power)
        return TokenDistribution.of_log_probs(log_p), log_sum + power * self.log_masses()

    def log_masses(self) -> torch.Tensor:
        """What a grammar leaves of p at each draw, ``[D]`` float32 logs; 0 where there is none."""
        if self.log_mass is None:
            return self.temperature.new_zeros(self.num_draws)
        return self.log_mass if self.rows is None else self.log_mass[self.rows]
