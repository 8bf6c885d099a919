"""Stop strings and stop patterns, found in each particle before it is weighted.

Token ids cannot tell where a stop string ends, so this runs on the host, and
only for requests that have one.
"""

import re
from typing import TYPE_CHECKING

import torch

from sglang_smc.requests.state import has_open_token, settled_ids
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def has_stop_text(req: "Req") -> bool:
    """Whether a request stops at a string or a pattern."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def first_match(req: "Req", tail: list[int], new_tokens: list[int]) -> int | None:
    """Index of the new token that completes a stop string or pattern, None without a match.

    Args:
        req: the request; its `settled_ids` are the text that all particles share.
        tail: the particle's tokens beyond it.
        new_tokens: what the particle may now append.
    """
    lineage = [*settled_ids(req)[-_window(req) :], *tail]
    for index, token in enumerate(new_tokens):
        lineage.append(token)
        if _matches(req, lineage[-_window(req) :]):
            return index
    return None


def _window(req: "Req") -> int:
    """How many trailing tokens a match can span, as SGLang bounds it."""
    params = req.sampling_params
    return max(params.stop_str_max_len, params.stop_regex_max_len) + 1


def _matches(req: "Req", tokens: list[int]) -> bool:
    text = req.tokenizer.decode(tokens)
    params = req.sampling_params
    return any(stop in text for stop in params.stop_strs) or any(
        re.search(pattern, text) for pattern in params.stop_regex_strs
    )


def mark_stop_texts(
    ends: torch.Tensor,
    reqs: "list[Req]",
    tokens: torch.Tensor,
    population: Population | None = None,
) -> torch.Tensor:
    """Add to ``ends`` ``[G, N, C]`` where the candidate ``tokens`` complete a stop text.

    Without a population the tokens stand right behind the emitted text.
    """
    groups = [group for group, req in enumerate(reqs) if has_stop_text(req)]
    if not groups:
        return ends
    ends = ends.clone()
    for group in groups:
        candidates = tokens[group].tolist()
        tails = tails_of(reqs[group], population, group) if population else [[]] * len(candidates)
        for particle, tail in enumerate(tails):
            match = first_match(reqs[group], tail, candidates[particle])
            if match is not None:
                ends[group, particle, match] = True
    return ends


def tails_of(req: "Req", population: Population, group: int) -> list[list[int]]:
    """What each particle of a request has beyond the text that is settled."""
    last_emitted, lengths = (
        population.last_emitted[group].tolist(),
        population.lengths[group].tolist(),
    )
    is_open = has_open_token(req)
    return [
        [*([last_emitted] if is_open else []), *tail[:length]]
        for last_emitted, tail, length in zip(
            last_emitted, population.tokens[group].tolist(), lengths, strict=True
        )
    ]
