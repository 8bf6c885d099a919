"""First tokens that each particle draws for itself, at the end of a prefill.

For p itself one token serves all particles. A power of p, or p within a grammar, knows the law of
its next token only given all that may follow, so that a shared token could not be corrected.
"""

from typing import TYPE_CHECKING

import torch

from sglang_smc.requests import stopping
from sglang_smc.requests.grammar import mark_terminated
from sglang_smc.requests.state import has_open_token
from sglang_smc.smc.proposal import sample
from sglang_smc.smc.randomness import Purpose, uniforms
from sglang_smc.smc.stratify import stratified
from sglang_smc.state.settings import Settings

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def first_tokens(
    num_particles: int,
    reqs: "list[Req]",
    settings: Settings,
    law: torch.Tensor,
    num_emitted: torch.Tensor,
    *,
    shared: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """First tokens ``[G, N]`` and whether each ends its text, which only open ones can.

    Args:
        num_particles: N of the server; requests may have fewer.
        law: ``[G, V]`` normalised log-probabilities.
        num_emitted: ``[G]`` output tokens before this one.
        shared: ``[G, 1]`` the token of requests whose particles share it.
    """
    particle = torch.arange(num_particles, device=law.device)
    noise = uniforms(settings.seeds.unsqueeze(1), num_emitted.unsqueeze(1), particle, Purpose.BONUS)
    present = particle < settings.num_particles.unsqueeze(1)
    same_text = present.unsqueeze(1) & present.unsqueeze(2)
    itself = torch.eye(num_particles, dtype=torch.bool, device=law.device)
    own = sample(
        law.unsqueeze(1).expand(-1, num_particles, -1), stratified(noise, same_text | itself)
    )
    is_open = torch.tensor([[has_open_token(req)] for req in reqs]).to(
        law.device, non_blocking=True
    )
    tokens = torch.where(is_open, own, shared)
    ends = settings.ends(tokens, (num_emitted + 1).unsqueeze(1).expand_as(tokens))
    ends = stopping.mark_stop_texts(ends.unsqueeze(2), reqs, tokens.unsqueeze(2))
    ends = mark_terminated(ends, reqs, tokens.unsqueeze(2)).squeeze(2)
    return tokens, ends & is_open  # SGLang itself looks at a token that all share
