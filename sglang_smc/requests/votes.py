"""Votes: of the particles that give an answer, the answer that weighs most wins.

What a text answers is found by the request's own pattern, once the text has ended: the last match,
or its first group. That is read on the host as the next round starts; until then a group whose
particles have all ended waits (`state.judged`).
"""

from http import HTTPStatus
from typing import TYPE_CHECKING

import regex

from sglang_smc.requests.failures import end_request
from sglang_smc.requests.potentials import decoder_of
from sglang_smc.requests.state import find_state, settled_ids, state_of, tails_of
from sglang_smc.requests.text_rule import BatchTexts, TextRule, Verdict
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

SECONDS = 0.5
"""That a pattern may look through one request's texts."""

_SLOW = (
    "The answer_pattern took more than {seconds:g} s to look through the texts of this request, "
    "which all requests wait for. Let no repetition repeat what itself repeats, as (a+)+ does."
)


class Votes(TextRule):
    """The requests whose particles vote.

    Args:
        answers: by group, of each particle.
    """

    needs_host = True
    judges = True

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = answers

    @classmethod
    def applies(cls, req: "Req") -> bool:
        """Whether a request's answer is voted for."""
        state = find_state(req)
        return state is not None and state.config.votes

    @classmethod
    def of(cls, texts: BatchTexts) -> "Votes":
        """See `TextRule.of`: reads the texts of those who have all ended."""
        if texts.population is None:
            return cls({})
        finished = texts.population.ended.all(1).tolist()
        reqs = {group: req for group, req in enumerate(texts.reqs) if cls.applies(req)}
        return cls(
            {
                group: _answers(req, texts.population, group)
                for group, req in reqs.items()
                if finished[group] and not req.to_finish
            }
        )

    def verdicts(self) -> dict[int, Verdict]:
        """See `TextRule.verdicts`."""
        return {
            group: Verdict([None] * len(found), [True] * len(found), found)
            for group, found in self._answers.items()
        }


def _answers(req: "Req", population: Population, group: int) -> list[int]:
    """Numbers of the answers that one request's particles give, from 0 on; -1 for none."""
    decode, settled = decoder_of(req), settled_ids(req)
    pattern = state_of(req).config.answer_pattern
    assert pattern is not None, "checked as the request came in"
    numbers: dict[str, int] = {}
    found = []
    for tail in tails_of(req, population, group):
        try:
            answer = answer_of(decode([*settled, *tail]), pattern)
        except TimeoutError:
            end_request(req, _SLOW.format(seconds=SECONDS), HTTPStatus.BAD_REQUEST)
            return [-1] * len(population.ended[group])
        found.append(-1 if answer is None else numbers.setdefault(answer, len(numbers)))
    return found


def answer_of(text: str, pattern: str) -> str | None:
    """The last match of a pattern in a text, or its first group; None without one.

    Raises:
        TimeoutError: where the search takes longer than it may.
    """
    last = None
    for match in regex.finditer(pattern, text, timeout=SECONDS):
        last = match
    if last is None:
        return None
    return last.group(1 if last.re.groups else 0)
