"""Stop strings and stop patterns, found in each particle before it is weighted.

Token ids cannot tell where a stop string ends, so this runs on the host, and
only for requests that have one.
"""

import re
from typing import TYPE_CHECKING, cast

import torch

from sglang_smc.requests.state import settled_ids, tails_of
from sglang_smc.requests.text_rule import BatchTexts, TextRule
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from transformers import PreTrainedTokenizerBase


class StopTexts(TextRule):
    """The requests that stop at a string or a pattern.

    Args:
        reqs: by group.
    """

    needs_host = True

    def __init__(self, reqs: "dict[int, Req]") -> None:
        self._reqs = reqs

    @classmethod
    def applies(cls, req: "Req") -> bool:
        """Whether a request stops at a string or a pattern."""
        return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)

    @classmethod
    def of(cls, texts: BatchTexts) -> "StopTexts":
        """See `TextRule.of`."""
        return cls({group: req for group, req in enumerate(texts.reqs) if cls.applies(req)})

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """See `TextRule.ends`."""
        ends = ends.clone()
        for group, req in self._reqs.items():
            candidates = tokens[group].tolist()
            tails = tails_of(req, population, group) if population else [[]] * len(candidates)
            for particle, tail in enumerate(tails):
                match = first_match(req, tail, candidates[particle])
                if match is not None:
                    ends[group, particle, match] = True
        return ends


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
    # SGLang declares it as None, and refuses stop texts where it has no tokenizer.
    text = cast("PreTrainedTokenizerBase", req.tokenizer).decode(tokens)
    params = req.sampling_params
    assert isinstance(text, str), "it is a list for a list of texts alone"
    assert params.stop_strs is not None and params.stop_regex_strs is not None, "normalized"
    return any(stop in text for stop in params.stop_strs) or any(
        re.search(pattern, text) for pattern in params.stop_regex_strs
    )
