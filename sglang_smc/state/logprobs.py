"""Compute the log-probabilities that a request returns, as SGLang defines them.

They are the target's, after logit edits and at the request's temperature, but before top-k,
top-p and min-p (srt/layers/sampler.py:140, srt/layers/logprob_processor.py:276). With
SGLANG_RETURN_ORIGINAL_LOGPROB=1 the temperature is not applied either.
"""

import torch
from sglang.srt.environ import envs

from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import restrict
from sglang_smc.state.population import Population, TailLogprobs


def logprob_distribution(
    kind: type[TokenDistribution],
    logits: torch.Tensor,
    temperature: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> TokenDistribution:
    """Return the distribution of the reported log-probabilities for ``G * M`` rows of logits.

    Args:
        kind: the class of the distribution, see `ops.interface`.
        logits: ``[G, M, V]`` of the target, edited, with stop tokens that come too early masked.
        temperature: ``[G]``.
        allowed: ``[G, M, V]`` bool mask of the requests' rules.
    """
    if envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        temperature = torch.ones_like(temperature)
    if allowed is not None:
        logits, _ = restrict(logits, allowed, temperature.unsqueeze(1))
    return kind(logits.flatten(0, 1), temperature)


def score(
    distribution: TokenDistribution,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    num_top: int,
) -> TailLogprobs:
    """Return log-probabilities of tokens, and of the likeliest and the listed tokens there.

    Args:
        distribution: of R rows, the same number for each group.
        tokens: ``[G, N, J]``.
        rows: ``[G, N, J]`` the row of each token.
        ids: ``[G, M]`` listed tokens of each group.
        num_top: W, the number of likeliest tokens.
    """
    lowest = torch.finfo(torch.float32).min  # SGLang's, in place of -inf
    own = distribution._replace(rows=rows.flatten()).score(tokens).clamp_min(lowest)
    if num_top == 0 and ids.shape[1] == 0:
        none = own.unsqueeze(3)[..., :0]
        return TailLogprobs(own, none, none.long(), none)
    log_p = distribution.log_probs()  # [R, V]
    top, top_ids = log_p.topk(num_top, dim=-1)
    by_group = log_p.unflatten(0, (len(ids), -1))
    listed = by_group.gather(2, ids.unsqueeze(1).expand(-1, by_group.shape[1], -1)).flatten(0, 1)
    top, listed = top.clamp_min(lowest), listed.clamp_min(lowest)
    return TailLogprobs(own, top[rows], top_ids[rows], listed[rows])


def score_tails(
    before: Population,
    population: Population,
    ancestors: torch.Tensor,
    shown: TokenDistribution,
    listed_ids: torch.Tensor,
) -> Population:
    """Score the tokens that a round has appended, draft tokens and the target's own.

    The j-th of them is scored by column j of the ancestor's chain.

    Args:
        before: population at the start of the round.
        population: population now.
        ancestors: ``[G, N]`` the earlier particle that each one continues.
        shown: distribution of all columns of all chains.
        listed_ids: ``[G, M]`` tokens that each request lists.
    """
    assert population.logprobs is not None
    num_groups, num_particles, width = population.tokens.shape
    starts = before.lengths.gather(1, ancestors)
    num_columns = shown.num_draws // ancestors.numel()
    column = torch.arange(num_columns, device=ancestors.device)
    # Places past a tail's new end are undefined, and the last is never part of a tail.
    place = (starts.unsqueeze(2) + column).clamp_max(width - 1)
    group = torch.arange(num_groups, device=ancestors.device).unsqueeze(1)
    chain = group * num_particles + ancestors  # [G, N]
    new = score(
        shown,
        population.tokens.gather(2, place),
        chain.unsqueeze(2) * num_columns + column,
        listed_ids,
        population.logprobs.top.shape[3],
    )
    return population._replace(logprobs=population.logprobs.write(place, new))
