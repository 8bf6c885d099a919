"""Play one batch as two rounds, where some of its requests are bounded by no budget.

A round takes as long as its largest request does for all. Where the load has the server reduce N
and K, a request that keeps its own would cost all others theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from torch.nn.functional import pad

from sglang_smc.kv.transfer import each_tensor, joined, on_device
from sglang_smc.options.policy import Policy
from sglang_smc.options.request import Budget
from sglang_smc.round.batch import RoundInputs
from sglang_smc.round.result import Outcome
from sglang_smc.state.request import state_of

#: Extras whose tensors of requests of different sizes are joined; others are of one round.
_JOINED = frozenset({"return_logprob"})


def groups_of(reqs: Sequence[Req], policy: Policy | None, *, always: bool) -> list[list[int]]:
    """Return the places of a batch's requests by round: all in one, or in two if that is faster.

    Of two the first is that of the requests beyond the budget.

    Args:
        always: whether each round of the server returns more than tokens.
    """
    every = list(range(len(reqs)))
    budget = state_of(reqs[0]).budget  # that of the round, of all of them
    if policy is None or budget is None or always:
        return [every]
    configs = [state_of(req).config_now for req in reqs]
    if not frozenset().union(*(config.extras for config in configs)) <= _JOINED:
        return [every]
    larger = [i for i, config in enumerate(configs) if not _fits(config, budget)]
    rest = [i for i in every if i not in set(larger)]
    if not larger or not rest or not policy.pays_apart(len(larger), len(rest), budget):
        return [every]
    return [larger, rest]


def _fits(config: Any, budget: Budget) -> bool:
    return config.num_particles <= budget.num_particles and config.num_steps <= budget.num_steps


def part_of(inputs: RoundInputs, group: list[int]) -> RoundInputs:
    """Return the inputs of the requests at these places."""
    places = on_device(inputs.rows.device, group)
    return RoundInputs._make(column.index_select(-1, places) for column in inputs)


def join(parts: Sequence[Outcome], groups: Sequence[list[int]]) -> Outcome:
    """Return the outcome of a batch, from those of the rounds of its ``groups``."""
    if len(parts) == 1:
        return parts[0]
    whole = joined(_alike(parts))
    order = on_device(whole.counts.device, [place for group in groups for place in group]).argsort()
    return each_tensor(lambda column: column[order], whole)


def _alike(parts: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes of equal widths, with a tensor where any has one.

    Tokens and log-probabilities behind those that are counted are not read.
    """
    filled = [_filled(part, parts) for part in parts]
    columns = [[*_tensors(part)] for part in filled]
    shapes = [
        torch.tensor([list(one.shape[1:]) for one in of]).amax(0).tolist()
        for of in zip(*columns, strict=True)
    ]
    found = []
    for part in filled:
        wanted = iter(shapes)
        found.append(each_tensor(lambda column, wanted=wanted: _widen(column, next(wanted)), part))
    return found


def _tensors(part: Outcome) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    each_tensor(lambda column: found.append(column) or column, part)
    return found


def _widen(column: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    more = [int(wide) - own for own, wide in zip(column.shape[1:], widths, strict=True)]
    return pad(column, [side for width in reversed(more) for side in (0, width)])


def _filled(part: Outcome, parts: Sequence[Outcome]) -> Outcome:
    """Return an outcome with what others alone have: no first tokens, and no nodes."""
    first = part.first_tokens
    if first is None and any(one.first_tokens is not None for one in parts):
        first = torch.full_like(part.counts, -1)
    nodes = part.num_nodes
    if nodes is None and any(one.num_nodes is not None for one in parts):
        nodes = torch.zeros_like(part.counts)
    return part._replace(first_tokens=first, num_nodes=nodes)
