"""N-gram matches as a part of what a round proposes, on the device.

SGLang's corpus says, for the last tokens of a text, which tokens followed them before, and which
those: a tree. At each draft step a particle stands at a node of its tree, or has left it. There
the law of a match is uniform over the node's children, since how often each was seen is not told;
where there are none q is the draft's law alone. All of that is known when a token is drawn, so q
is, and weights and verification correct for it as for any draft.

What a request's rules forbid the draft has no mass on, and a match gets none there either.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_smc.drafts.corpus import Corpus
from sglang_smc.requests.state import state_of
from sglang_smc.state.population import Population
from sglang_smc.state.transfer import on_device, to_device
from sglang_smc.tokens.distribution import Draws, TokenDistribution, of_each_draw
from sglang_smc.tokens.mixture import likeliest, mix

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_OUTSIDE = -1  # what was drawn is not in the tree; no node has it for a parent


class Matches(NamedTuple):
    """The trees behind the texts of a batch, and how far a round has followed them.

    D = G * N particles, T nodes of a tree.
    """

    tokens: torch.Tensor  # [D, T] int64; the root stands first, for the text itself
    parents: torch.Tensor  # [D, T] int64 nodes; -2 of the root, and of nodes that are none
    node: torch.Tensor  # [D] int64 where each particle stands; `_OUTSIDE` once it has left
    weights: torch.Tensor  # [D] float32: w of each particle's request
    alone: bool = False  # there is no draft model: its logits say only what rules forbid

    @classmethod
    def of(cls, corpus: Corpus, reqs: "list[Req]", population: Population) -> "Matches":
        """What the corpus knows of the texts that a round starts from; it waits for the device."""
        size, num_particles, _ = population.texts.shape
        device = population.texts.device
        tokens, parents = map(torch.from_numpy, corpus.trees(reqs, population))
        weights = [state_of(req).now.ngram_weight for req in reqs]
        return cls(
            to_device(device, tokens),
            to_device(device, parents),
            torch.zeros(size * num_particles, dtype=torch.int64, device=device),
            of_each_draw(on_device(device, weights, torch.float32), size * num_particles),
            corpus.alone,
        )

    def follow(self, drawn: torch.Tensor) -> "Matches":
        """Where particles stand once ``drawn`` ``[G, N]`` has been drawn, one token by each."""
        found = self._children() & (self.tokens == drawn.flatten().unsqueeze(1))  # one at most
        node = torch.where(found.any(1), found.long().argmax(1), _OUTSIDE)
        return self._replace(node=node)

    def mixed(self, ops: Draws, draft: TokenDistribution) -> TokenDistribution:
        """q where the draft's law is ``draft``, of D rows.

        At temperature 0 the draft's law is its likeliest token, and q that of the mixture: the
        match's where w is above a half and it is the only one, so that such a text draws nothing.

        Without a draft model the other law is all on one token, the first that rules allow: any
        is as good, since verification rejects it unless the target wants it.
        """
        num_draws = len(self.node)
        at_temperature_0 = draft.greedy
        if self.alone:
            every = torch.ones_like(draft.temperature, dtype=torch.bool)
            draft = draft._replace(greedy=every, kept=None, sums=None)
        log_q = draft.log_probs(ops)  # [D, V]
        support = log_q.gather(1, self.tokens) > -torch.inf  # [D, T]
        if draft.greedy is not None:
            is_point = of_each_draw(draft.greedy, num_draws).unsqueeze(1)
            allowed = draft.scores.gather(1, self.tokens) > -torch.inf
            support = torch.where(is_point, allowed, support)
        mixture = mix(log_q, self.tokens, self._children() & support, self.weights)
        if at_temperature_0 is not None:
            is_point = of_each_draw(at_temperature_0, num_draws).unsqueeze(1)
            mixture = torch.where(is_point, likeliest(mixture), mixture)
        return as_law(mixture, draft)

    def _children(self) -> torch.Tensor:
        """Which nodes ``[D, T]`` follow the one where each particle stands."""
        return self.parents == self.node.unsqueeze(1)


def as_law(log_q: torch.Tensor, like: TokenDistribution) -> TokenDistribution:
    """The distribution of log-probabilities ``[D, V]``, of as many groups as ``like``."""
    return TokenDistribution(log_q, torch.ones_like(like.temperature))
