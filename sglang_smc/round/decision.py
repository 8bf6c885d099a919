"""What a round drafts, and what is decided about it: the forms in which both leave their steps."""

from typing import NamedTuple

import torch

from sglang_smc.smc import rounds
from sglang_smc.smc.fidelity import Watchable
from sglang_smc.state.population import Population
from sglang_smc.tokens.distribution import NextTokens, TokenDistribution


class Drafts(NamedTuple):
    """What the draft proposed, and with what probability."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens
    ends: torch.Tensor  # [G, N, K] bool: the text ends with this token
    before_end: torch.Tensor  # [G, N, K] bool: up to the particle's end, within its request's K
    q: list[TokenDistribution] | None  # of G * N draws each; kept where some group verifies
    watchable: Watchable | None = None  # where they are compared with the target's law
    held: torch.Tensor | None = None  # [G * N, V] scores that they were drawn from there


class Decision(NamedTuple):
    """What becomes of the drafts: weighed or verified, both end in these."""

    cut: rounds.BlockCut
    num_kept: torch.Tensor  # [G, N] drafted tokens that each particle keeps
    resampled: rounds.Resampled  # who goes on then, and with what weight
    next_tokens: NextTokens
    verified: torch.Tensor  # [G] bool: exact verification had the last word
    failure: torch.Tensor  # [G] int64 `Failure`, where logits gave no law to decide by

    def unless(self, mine: torch.Tensor, other: "Decision") -> "Decision":
        """This decision by verifying, and in the groups ``mine`` ``[G]`` bool the ``other`` one."""
        return Decision(
            cut=rounds.choose(mine, other.cut, self.cut),
            num_kept=rounds.choose(mine, other.num_kept, self.num_kept),
            resampled=rounds.choose(mine, other.resampled, self.resampled),
            next_tokens=self.next_tokens.unless(mine, other.next_tokens),
            verified=self.verified & ~mine,
            failure=self.failure,
        )


def no_drafts(population: Population) -> Drafts:
    """The drafts of a round with K = 0."""
    nothing = population.tokens[:, :, :0]  # [G, N, 0]
    return Drafts(nothing, nothing.float(), nothing.bool(), nothing.bool(), None)
