"""What a request does to logits before temperature and filters: the same to p and to q.

Each particle has a text of its own, so every row of logits is edited by the text that it follows.
The order is that of SGLang's sampler: penalties, bias, custom processors.
"""

from typing import TYPE_CHECKING, Protocol

import torch

from sglang_smc.requests import penalties, processors
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Edit(Protocol):
    """One way to change logits, made for one round, or for a prefill."""

    def __call__(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """The edited logits.

        Args:
            logits: ``[G, N, C, V]``, of either model. Row c of a particle follows its text at the
                start of the round and ``chains[:, :, : first + c]``.
            chains: ``[G, N, J]`` what the particles have drafted in this round, J >= first + C - 1.
            first: drafted tokens that row 0 follows.

        Returns:
            ``[G, N, C, V]``; the argument may have been changed in place.
        """
        ...


def edited(
    edits: tuple[Edit, ...], logits: torch.Tensor, chains: torch.Tensor, first: int
) -> torch.Tensor:
    """All of a round's edits, one after another; shapes as for `Edit`."""
    for edit in edits:
        logits = edit(logits, chains, first)
    return logits


def is_edited(req: "Req") -> bool:
    """Whether a request changes logits."""
    return penalties.penalizes(req) or penalties.has_bias(req) or processors.has_processor(req)


def edits_of(reqs: "list[Req]", population: Population | None) -> tuple[Edit, ...]:
    """The edits of a round that starts from ``population``, or of a prefill, which has none.

    At a prefill N is 1: the text is all that the request has emitted.
    """
    found = (
        penalties.Penalties.of(reqs, population),
        penalties.Bias.of(reqs),
        processors.Processors.of(reqs, population),
    )
    return tuple(edit for edit in found if edit is not None)


def begin(reqs: "list[Req]", logits: torch.Tensor) -> torch.Tensor:
    """Edit the logits ``[G, V]`` of first tokens, and note what the requests' rounds will need."""
    if not any(is_edited(req) for req in reqs):
        return logits
    penalties.begin(reqs, logits.shape[1], logits.device)
    processors.begin(reqs)
    nothing = torch.empty(len(reqs), 1, 0, dtype=torch.int64, device=logits.device)  # [G, N, J]
    rows = logits.clone().unsqueeze(1).unsqueeze(1)  # SGLang may read its own again
    return edited(edits_of(reqs, None), rows, nothing, 0).view_as(logits)


def commit(reqs: "list[Req]", settled: Population, counts: torch.Tensor) -> None:
    """Note that all particles of group g emit the first ``counts[g]`` tokens of their tails."""
    penalties.commit(reqs, settled, counts)
