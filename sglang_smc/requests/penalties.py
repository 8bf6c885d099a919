"""Frequency, presence and repetition penalties, and biases, as SGLang's sampler applies them.

Penalties count the tokens of the output, not those of the prompt (`srt/sampling/penaltylib`). Here
that is a particle's own output: what its request has emitted, its tail, and what it has drafted in
this round. Unlike SGLang's, the counts survive a retraction.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_smc.requests.state import settled_ids, state_of
from sglang_smc.requests.text_rule import BatchTexts, TextRule
from sglang_smc.state.population import Population
from sglang_smc.state.transfer import on_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Rates(NamedTuple):
    """Penalties of P requests, each ``[P, 1, 1, 1]`` float32."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    def apply(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Penalize tokens by how often texts have them.

        Args:
            logits: ``[P, N, C, J]`` of J tokens.
            counts: float32, broadcasts to the same.
        """
        occurs = counts > 0
        lowered = logits - (self.frequency * counts + self.presence * occurs)
        factor = torch.where(occurs, self.repetition, 1.0)
        return torch.where(lowered < 0, lowered * factor, lowered / factor)


class Penalties(TextRule):
    """The requests that penalize tokens which their text has already.

    Args:
        reqs: theirs.
        places: ``[P]`` int64, their groups.
        counts: ``[P, N, V]`` float32, of each token in each particle's text.
        rates: theirs.
    """

    def __init__(
        self, reqs: "list[Req]", places: torch.Tensor, counts: torch.Tensor, rates: Rates
    ) -> None:
        self._reqs = reqs
        self._places = places
        self._counts = counts
        self._rates = rates

    @classmethod
    def applies(cls, req: "Req") -> bool:
        """Whether some rate is not neutral."""
        return _rates(req) != (0.0, 0.0, 1.0)

    @classmethod
    def begin(cls, req: "Req", vocab_size: int, device: torch.device | str) -> None:
        """Count what the request has emitted, but for its last token: ``[V]`` float32."""
        ids = on_device(device, settled_ids(req)).long()
        nothing = torch.zeros(vocab_size, device=device)
        counts = nothing.index_add(0, ids, torch.ones_like(ids, dtype=torch.float32))
        state_of(req).kept[cls] = counts

    @classmethod
    def of(cls, texts: BatchTexts) -> "Penalties":
        """See `TextRule.of`."""
        chosen, population = _places_of(cls, texts), texts.population
        own = [texts.reqs[group] for group in chosen]
        emitted = _emitted(own)  # [P, V]
        places = on_device(emitted.device, chosen)
        rates = on_device(emitted.device, [_rates(req) for req in own]).float()
        counts = emitted.unsqueeze(1)
        if population is not None:
            counts = _with_tails(emitted, _texts(population)[places], population.lengths[places])
        return cls(own, places, counts, Rates(*rates.view(-1, 3, 1, 1, 1).unbind(1)))

    def edit(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """See `TextRule.edit`."""
        mine, chain = logits[self._places], chains[self._places]  # [P, N, C, V], [P, N, J]
        tokens = chain.unsqueeze(2).expand(-1, -1, mine.shape[2], -1)  # [P, N, C, J]
        in_chain = self._rates.apply(
            mine.gather(3, tokens), self._counts_in_chain(chain, first, mine.shape[2])
        )
        in_text = self._rates.apply(mine, self._counts.unsqueeze(2))
        # A token that a chain has twice is written twice, with one value.
        return logits.index_copy_(0, self._places, in_text.scatter_(3, tokens, in_chain))

    def _counts_in_chain(self, chain: torch.Tensor, first: int, num_columns: int) -> torch.Tensor:
        """How often the text before each row has each token of the chain: ``[P, N, C, J]``."""
        place = torch.arange(chain.shape[2], device=chain.device)
        column = torch.arange(num_columns, device=chain.device).view(-1, 1, 1)
        same = chain.unsqueeze(3) == chain.unsqueeze(2)  # [P, N, J, J]
        before = (same.unsqueeze(2) & (place < first + column)).sum(4)
        return self._counts.gather(2, chain).unsqueeze(2) + before

    def commit(self, collapsed: Population, counts: torch.Tensor) -> None:
        """See `TextRule.commit`."""
        # The last emitted token is text for good once a token is emitted behind it.
        after = _with_tails(
            _emitted(self._reqs),
            _texts(collapsed)[self._places, :1],
            counts[self._places, None] - 1,
        )
        for req, of_group in zip(self._reqs, after, strict=True):
            state_of(req).kept[Penalties] = of_group[0]


class Bias(TextRule):
    """The requests that bias tokens.

    Args:
        places: ``[B]`` int64, their groups.
        values: ``[B, V]`` float32, added to the logits.
    """

    def __init__(self, places: torch.Tensor, values: torch.Tensor) -> None:
        self._places = places
        self._values = values

    @classmethod
    def applies(cls, req: "Req") -> bool:
        """Whether a request biases any token."""
        return bool(req.sampling_params.logit_bias)

    @classmethod
    def begin(cls, req: "Req", vocab_size: int, device: torch.device | str) -> None:
        """Spread the biases over the vocabulary: ``[V]`` float32."""
        biased = req.sampling_params.logit_bias
        assert biased is not None, "only for requests that it applies to"
        values = {int(token): value for token, value in biased.items()}
        ids, nothing = on_device(device, list(values)), torch.zeros(vocab_size, device=device)
        biases = nothing.index_copy(0, ids, on_device(device, list(values.values())).float())
        state_of(req).kept[cls] = biases

    @classmethod
    def of(cls, texts: BatchTexts) -> "Bias":
        """See `TextRule.of`."""
        chosen = _places_of(cls, texts)
        values = torch.stack([state_of(texts.reqs[group]).kept[cls] for group in chosen])
        return cls(on_device(values.device, chosen), values)

    def edit(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """See `TextRule.edit`."""
        values = self._values.view(-1, 1, 1, logits.shape[3])
        return logits.index_copy_(0, self._places, logits[self._places] + values)


def _places_of(rule: type[TextRule], texts: BatchTexts) -> list[int]:
    """The groups that have a rule."""
    return [group for group, req in enumerate(texts.reqs) if rule.applies(req)]


def _rates(req: "Req") -> tuple[float, float, float]:
    params = req.sampling_params
    return params.frequency_penalty, params.presence_penalty, params.repetition_penalty


def _emitted(reqs: "list[Req]") -> torch.Tensor:
    """Counts ``[P, V]`` of each token in the emitted texts but for their last tokens."""
    return torch.stack([state_of(req).kept[Penalties] for req in reqs])


def _texts(population: Population) -> torch.Tensor:
    """``[G, N, 1 + T]``: what each particle has for the last emitted token, and its tail."""
    return population.texts[:, :, 1:]


def _with_tails(emitted: torch.Tensor, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Add the first 1 + ``lengths`` ``[P, N]`` tokens of texts ``[P, N, J]``: ``[P, N, V]``."""
    place = torch.arange(texts.shape[2], device=texts.device)
    counts = emitted.unsqueeze(1).expand(-1, texts.shape[1], -1)
    return counts.scatter_add(2, texts, (place <= lengths.unsqueeze(2)).to(counts.dtype))
