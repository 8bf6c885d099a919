"""Frequency, presence and repetition penalties, and biases, as SGLang's sampler applies them.

Penalties count the tokens of the output, not those of the prompt (`srt/sampling/penaltylib`). Here
that is a particle's own output: what its request has emitted, its tail, and what it has drafted in
this round. Unlike SGLang's, the counts survive a retraction.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_smc.requests.state import settled_ids, state_of
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def penalizes(req: "Req") -> bool:
    """Whether a request penalizes tokens that its text has already."""
    return _rates(req) != (0.0, 0.0, 1.0)


def has_bias(req: "Req") -> bool:
    """Whether a request biases tokens."""
    return bool(req.sampling_params.logit_bias)


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


class Penalties:
    """The `Edit` of the requests that penalize.

    Args:
        places: ``[P]`` int64, their groups.
        counts: ``[P, N, V]`` float32, of each token in each particle's text.
        rates: theirs.
    """

    def __init__(self, places: torch.Tensor, counts: torch.Tensor, rates: Rates) -> None:
        self._places = places
        self._counts = counts
        self._rates = rates

    @classmethod
    def of(cls, reqs: "list[Req]", population: Population | None) -> "Penalties | None":
        """For texts as they stand in ``population``, or as emitted; None if nobody penalizes."""
        chosen = [group for group, req in enumerate(reqs) if penalizes(req)]
        if not chosen:
            return None
        emitted = _emitted(reqs, chosen)  # [P, V]
        places = _on(emitted.device, chosen)
        rates = _on(emitted.device, [_rates(reqs[group]) for group in chosen]).float()
        counts = emitted.unsqueeze(1)
        if population is not None:
            counts = _with_tails(emitted, _texts(population)[places], population.lengths[places])
        return cls(places, counts, Rates(*rates.view(-1, 3, 1, 1, 1).unbind(1)))

    def __call__(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """See `Edit`."""
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


class Bias:
    """The `Edit` of the requests that bias tokens.

    Args:
        places: ``[B]`` int64, their groups.
        values: ``[B, V]`` float32, added to the logits.
    """

    def __init__(self, places: torch.Tensor, values: torch.Tensor) -> None:
        self._places = places
        self._values = values

    @classmethod
    def of(cls, reqs: "list[Req]") -> "Bias | None":
        """None if nobody biases."""
        chosen = [group for group, req in enumerate(reqs) if has_bias(req)]
        if not chosen:
            return None
        values = torch.stack([state_of(reqs[group]).bias for group in chosen])
        return cls(_on(values.device, chosen), values)

    def __call__(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """See `Edit`."""
        values = self._values.view(-1, 1, 1, logits.shape[3])
        return logits.index_copy_(0, self._places, logits[self._places] + values)


def begin(reqs: "list[Req]", vocab_size: int, device: torch.device) -> None:
    """Note what requests have emitted, as they are prefilled, and what they bias."""
    for req in reqs:
        run, nothing = state_of(req), torch.zeros(vocab_size, device=device)
        if penalizes(req):
            ids = _on(device, settled_ids(req)).long()
            run.counts = nothing.index_add(0, ids, torch.ones_like(ids, dtype=torch.float32))
        if has_bias(req):
            values = {int(token): value for token, value in req.sampling_params.logit_bias.items()}
            ids = _on(device, list(values))
            run.bias = nothing.index_copy(0, ids, _on(device, list(values.values())).float())


def commit(reqs: "list[Req]", settled: Population, counts: torch.Tensor) -> None:
    """Note that all particles of group g emit the first ``counts[g]`` tokens of their tails."""
    chosen = [group for group, req in enumerate(reqs) if penalizes(req)]
    if not chosen:
        return
    places = _on(counts.device, chosen)
    # The last_emitted is emitted text for good once a token is emitted behind it.
    after = _with_tails(
        _emitted(reqs, chosen), _texts(settled)[places, :1], counts[places, None] - 1
    )
    for group, of_group in zip(chosen, after, strict=True):
        state_of(reqs[group]).counts = of_group[0]


def _rates(req: "Req") -> tuple[float, float, float]:
    params = req.sampling_params
    return params.frequency_penalty, params.presence_penalty, params.repetition_penalty


def _emitted(reqs: "list[Req]", chosen: list[int]) -> torch.Tensor:
    """Counts ``[P, V]`` of each token in the emitted texts, which lack the particles' last_emitted."""
    return torch.stack([state_of(reqs[group]).counts for group in chosen])


def _texts(population: Population) -> torch.Tensor:
    """``[G, N, 1 + T]``: what each particle has for the last emitted token, and its tail."""
    return population.texts[:, :, 1:]


def _with_tails(emitted: torch.Tensor, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Add the first 1 + ``lengths`` ``[P, N]`` tokens of texts ``[P, N, J]``: ``[P, N, V]``."""
    place = torch.arange(texts.shape[2], device=texts.device)
    counts = emitted.unsqueeze(1).expand(-1, texts.shape[1], -1)
    return counts.scatter_add(2, texts, (place <= lengths.unsqueeze(2)).to(counts.dtype))


def _on(device: torch.device, values: list[Any]) -> torch.Tensor:
    return torch.tensor(values).to(device, non_blocking=True)
