"""Votes: of the particles that give an answer, the answer that weighs most wins.

The answer of a text is found by the request's own pattern, once the text has ended: the last match,
or its first group. That is read on the host as the next round starts; until then a group whose
particles have all ended waits (`state.judged`). Where that is more than a round may read, texts
wait for later rounds: by their lengths alone, so that all ranks agree.
"""

from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang_smc.options.answers import AnswerPattern, answer_pattern
from sglang_smc.requests.failures import end_request
from sglang_smc.requests.potentials import decoder_of
from sglang_smc.requests.state import find_state, settled_ids, state_of, tails_of
from sglang_smc.requests.text_rule import BatchTexts, TextRule, Verdict
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

MOST_STEPS = 25_000_000
"""Bytes of texts, times instructions of their patterns, that one round may read for all requests:
0.3 s at worst (`options.answers`), usually 0.01."""

_LONG = (
    "A particle's text has {length} bytes and the answer_pattern {size} instructions; allowed: "
    f"{MOST_STEPS} of the one times the other. Ask for fewer tokens, or simplify the pattern: "
    "bounded repetitions and classes of letters are large."
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
        round_ = _Reading()
        answers = {
            group: round_.answers(req, texts.population, group)
            for group, req in enumerate(texts.reqs)
            if finished[group] and cls.applies(req) and not req.to_finish
        }
        return cls({group: found for group, found in answers.items() if found is not None})

    def verdicts(self) -> dict[int, Verdict]:
        """See `TextRule.verdicts`."""
        return {
            group: Verdict([None] * len(found), [True] * len(found), found)
            for group, found in self._answers.items()
        }


class _Reading:
    """The texts that one round reads."""

    def __init__(self) -> None:
        self._steps_left = MOST_STEPS

    def answers(self, req: "Req", population: Population, group: int) -> list[int] | None:
        """Return the numbers of the answers of one request's particles, from 0 on; -1 for none.

        None where a later round goes on, or the request ends with an error.
        """
        state, settled, decode = state_of(req), settled_ids(req), decoder_of(req)
        assert state.config.answer_pattern is not None, "checked as the request came in"
        pattern = answer_pattern(state.config.answer_pattern)
        known: dict[tuple[int, ...], bytes | None] = state.kept.setdefault(Votes, {})
        texts = [(*settled, *tail) for tail in tails_of(req, population, group)]
        for tokens in texts:
            if tokens in known:
                continue
            text = decode(tokens).encode()
            if not self._may_read(req, text, pattern):
                return None
            known[tokens] = pattern.last(text)
        numbers: dict[bytes, int] = {}
        found = [known[tokens] for tokens in texts]
        return [-1 if one is None else numbers.setdefault(one, len(numbers)) for one in found]

    def _may_read(self, req: "Req", text: bytes, pattern: AnswerPattern) -> bool:
        steps = len(text) * pattern.num_instructions
        if steps > MOST_STEPS:
            message = _LONG.format(length=len(text), size=pattern.num_instructions)
            end_request(req, message, HTTPStatus.BAD_REQUEST)
        if steps > self._steps_left:
            self._steps_left = 0  # those behind wait, too: a batch is read in its order
            return False
        self._steps_left -= steps
        return True
