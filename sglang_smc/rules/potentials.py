"""Query the potentials of requests, and take the majority votes of their particles, on the host.

A round queries the sequences that it starts from, in threads, while the device drafts, and takes
the values when drafts have been scored, just before they are weighed. A sequence that ends in a
round is scored as a whole in the next: a group waits for that if all of its particles have ended.

The sequences of a request form a tree below their settled prefix, so that shared prefixes are
decoded and queried once. A node points to the last ancestor at which each potential was due.

The answer of a particle for the majority vote is found by the request's own pattern once the
sequence has ended: the last match, or its first group. The host reads it as the next round starts;
until then a group waits if all particles have ended. A round reads a bounded amount, and the
rest waits for later rounds: which, depends on lengths alone, so that it is the same on all ranks.
"""

import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sglang.srt.distributed import parallel_state

from sglang_smc.options.answers import AnswerPattern, answer_pattern
from sglang_smc.potentials.base import Text
from sglang_smc.potentials.calls import Call, Failed, Question
from sglang_smc.potentials.declared import Chosen, Schedule
from sglang_smc.rules.base import BatchTexts, TextRule, Verdict
from sglang_smc.state.failures import end_request
from sglang_smc.state.population import Population
from sglang_smc.state.request import find_state, settled_ids, state_of, tails_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from transformers import PreTrainedTokenizerBase

CONTEXT = 8
"""Tokens of context with which a new one is decoded, beside those that a delimiter can span."""

Decode = Callable[[Sequence[int]], str]


class Place:
    """A node of the tree: a prefix of an output."""

    __slots__ = ("_longer", "asked_at", "length", "recent", "values", "whole")

    def __init__(
        self, length: int, recent: tuple[int, ...], asked_at: "tuple[Place | None, ...]"
    ) -> None:
        self.length = length  # tokens of output
        self.recent = recent  # the last of these
        # By potential: the last node, this one included, at which it was due; None: not yet.
        self.asked_at = asked_at
        self.values: dict[int, float] = {}  # by potential: log phi of this prefix
        self.whole: dict[int, float] = {}  # by potential: log phi of a sequence that ends here
        self._longer: dict[int, Place] = {}

    def then(self, token: int, schedules: Sequence[Schedule], decode: Decode) -> "Place":
        """Return the node one token further."""
        if token not in self._longer:
            self._longer[token] = self._grown(token, schedules, decode)
        return self._longer[token]

    def _grown(self, token: int, schedules: Sequence[Schedule], decode: Decode) -> "Place":
        recent = (*self.recent[-_window(schedules) :], token)
        place = Place(self.length + 1, recent, self.asked_at)
        falls = [_falls_on(schedule, place, token, decode) for schedule in schedules]
        both = zip(self.asked_at, falls, strict=True)
        place.asked_at = tuple(place if now else before for before, now in both)
        return place


def _window(schedules: Sequence[Schedule]) -> int:
    """Return the number of tokens that a delimiter can span: each has a character or more."""
    texts = (each.delimiter for each in schedules if isinstance(each.delimiter, str))
    return max((len(text.encode()) for text in texts), default=0) + CONTEXT


def _falls_on(schedule: Schedule, place: Place, token: int, decode: Decode) -> bool:
    if schedule.is_each_round:
        return True  # at the start of each round
    if not isinstance(schedule.delimiter, str):
        return schedule.falls_on(place.length, token)
    before = decode(place.recent[:-1]).count(schedule.delimiter)
    return decode(place.recent).count(schedule.delimiter) > before


class Readings:
    """The tree of one request's sequences.

    Args:
        schedules: by potential.
        decode: tokens to text.
        prompt_ids: tokens of the prompt.
    """

    def __init__(
        self, schedules: Sequence[Schedule], decode: Decode, prompt_ids: tuple[int, ...] = ()
    ) -> None:
        self.prompt_ids = prompt_ids
        self._schedules = schedules
        self._decode = decode
        self._settled = Place(0, (), (None,) * len(schedules))

    def places(self, settled: Sequence[int], tails: Sequence[Sequence[int]]) -> list[Place]:
        """Return the node at which each particle's sequence ends.

        Args:
            settled: output tokens that all particles share, which only grow from call to call.
            tails: of each particle, beyond these.
        """
        self._settled = self._walk(self._settled, settled[self._settled.length :])
        return [self._walk(self._settled, tail) for tail in tails]

    def _walk(self, place: Place, tokens: Sequence[int]) -> Place:
        for token in tokens:
            place = place.then(token, self._schedules, self._decode)
        return place


MOST = 1e300
"""The largest log phi: differences of two are finite. Below -MOST, phi is 0."""

_TOO_LARGE = (
    "The potentials {names} with their exponents add up to {value:g} for a text; allowed: up to "
    "1e300. Lower an exponent, or mend the potential. Others are not affected."
)

_FORBIDDEN = (
    "The potentials {names} forbid the texts of all {num_particles} particles, behind {num_tokens} "
    "output tokens that these share. Ask for more particles, or loosen the potentials."
)


class _Particle(NamedTuple):
    """The sequence of a particle, as a round starts."""

    output_ids: tuple[int, ...]
    place: Place  # the node at which it ends
    has_ended: bool


class _Wanted(NamedTuple):
    """A potential value that is not known yet."""

    group: int
    index: int  # of the potential in the request's list
    place: Place
    is_whole: bool
    text: Text

    @property
    def question(self) -> Question:
        return Question(self.text, self.is_whole, self.group)

    def keep(self, answer: float) -> None:
        (self.place.whole if self.is_whole else self.place.values)[self.index] = answer


class Potentials(TextRule):
    """The potentials of a batch.

    Args:
        reqs: by group.
        particles: of each of these, by index; None for one of weight zero.
    """

    needs_host = True
    judges = True

    def __init__(
        self, reqs: "dict[int, Req]", particles: dict[int, list[_Particle | None]]
    ) -> None:
        self._reqs = reqs
        self._particles = particles
        self._wanted: dict[str, list[_Wanted]] = {}  # by the potential's name
        for group, req in reqs.items():
            for name, wanted in _wanted_of(group, req, particles[group]):
                self._wanted.setdefault(name, []).append(wanted)
        self._calls = self._begin_calls() if _is_first_rank() else {}

    @classmethod
    def applies(cls, req: "Req") -> bool:
        """Return whether a request names potentials."""
        state = find_state(req)
        return state is not None and bool(state.potentials)

    @classmethod
    def begin(cls, req: "Req") -> None:
        """Keep the tree of a retracted request, which stays valid; see `TextRule.begin`."""
        state = state_of(req)
        if cls not in state.kept:
            schedules = [chosen.schedule for chosen in state.potentials]
            prompt_ids = tuple(req.origin_input_ids)
            state.kept[cls] = Readings(schedules, decoder_of(req), prompt_ids)

    @classmethod
    def of(cls, texts: BatchTexts) -> "Potentials":
        """Start the queries of a round; see `TextRule.of`."""
        population = texts.population
        if population is None:
            return cls({}, {})
        reqs = {group: req for group, req in enumerate(texts.reqs) if cls._asks(req)}
        return cls(reqs, {group: _particles(req, population, group) for group, req in reqs.items()})

    @classmethod
    def _asks(cls, req: "Req") -> bool:
        return cls.applies(req) and not (req.finished() or req.to_finish)

    def verdicts(self) -> dict[int, Verdict]:
        """Wait for the queries and return their values; see `TextRule.verdicts`."""
        calls = self._calls.items()
        found = {name: c if isinstance(c, Failed) else c.answers() for name, c in calls}
        for name, answers in _of_first_rank(found).items():
            if isinstance(answers, Failed):
                self._end_all(name, answers)
                continue
            for one, answer in zip(self._wanted[name], answers, strict=True):
                if isinstance(answer, Failed):
                    _end(self._reqs[one.group], answer)
                else:
                    one.keep(answer)
        return {group: self._verdict(group, req) for group, req in self._reqs.items()}

    def _end_all(self, name: str, failed: Failed) -> None:
        """End the requests that name a potential which is not queried now."""
        for req in self._reqs.values():
            if any(chosen.name == name for chosen in state_of(req).potentials):
                _end(req, failed)

    def _verdict(self, group: int, req: "Req") -> Verdict:
        particles, chosen = self._particles[group], state_of(req).potentials
        if req.to_finish:  # with an error: some values are missing
            return Verdict.none(len(particles))
        log_values = [one and _log_value(one, chosen) for one in particles]
        for value in log_values:
            if value is not None and not value <= MOST:  # NaN, too
                _end(req, Failed(_TOO_LARGE.format(names=_names(req), value=value)))
                return Verdict.none(len(particles))
        if all(value is None or value == -math.inf for value in log_values):
            self.end_stuck(req)  # before other rules, which are not the cause
        return Verdict(
            log_values=log_values,
            complete=[one is None or one.has_ended for one in particles],
        )

    def _begin_calls(self) -> dict[str, Call | Failed]:
        """Start the queries, on the first rank of a tensor-parallel group: all must get the same.

        Returns:
            By the potential's name: the call under way, or why it is not queried. Left out where
            there is nothing to query.
        """
        callers = {
            caller.name: caller for req in self._reqs.values() for caller in state_of(req).callers
        }
        found: dict[str, Call | Failed] = {}
        for name, caller in callers.items():
            if refusal := caller.refusal():
                found[name] = refusal
            elif wanted := self._wanted.get(name):
                found[name] = caller.ask([one.question for one in wanted])
        return found

    @classmethod
    def end_stuck(cls, req: "Req") -> bool:
        """End a request if potentials forbid all sequences; see `TextRule.end_stuck`."""
        state = state_of(req)
        message = _FORBIDDEN.format(
            names=_names(req),
            num_particles=state.config.num_particles,
            num_tokens=len(settled_ids(req)),
        )
        end_request(req, message, HTTPStatus.BAD_REQUEST)
        return True


def decoder_of(req: "Req") -> Decode:
    """Return a function that decodes a request's tokens, without special ones."""
    # SGLang declares it as None; a server without one has no potentials.
    tokenizer = cast("PreTrainedTokenizerBase", req.tokenizer)

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str), "it is a list for a list of texts alone"
        return text

    return decode


def _particles(req: "Req", population: Population, group: int) -> list[_Particle | None]:
    """Return one request's particles, None for absent ones and those of weight zero."""
    readings: Readings = state_of(req).kept[Potentials]
    settled, tails = settled_ids(req), tails_of(req, population, group)
    ended = population.ended[group].tolist()
    weighs = (population.present[group] & population.log_weights[group].isfinite()).tolist()
    places = readings.places(settled, tails)
    each = zip(tails, places, ended, weighs, strict=True)
    return [
        _Particle((*settled, *tail), place, has_ended) if counts else None
        for tail, place, has_ended, counts in each
    ]


def _wanted_of(
    group: int, req: "Req", particles: list[_Particle | None]
) -> "list[tuple[str, _Wanted]]":
    """Return the values that one request's potentials have to give, each sequence once."""
    found: dict[tuple[int, int], tuple[str, _Wanted]] = {}
    for index, chosen in enumerate(state_of(req).potentials):
        for one in particles:
            place = one and (one.place if one.has_ended else one.place.asked_at[index])
            if one is None or place is None or (index, id(place)) in found:
                continue
            known = place.whole if one.has_ended else place.values
            if index not in known:
                text = _text(req, one.output_ids[: place.length], chosen.args)
                wanted = _Wanted(group, index, place, one.has_ended, text)
                found[index, id(place)] = chosen.name, wanted
    return list(found.values())


def _text(req: "Req", output_ids: tuple[int, ...], args: Any) -> Text:
    readings: Readings = state_of(req).kept[Potentials]
    return Text(readings.prompt_ids, output_ids, args, decoder_of(req))


def _log_value(particle: _Particle, potentials: Sequence[Chosen]) -> float:
    """Return the sum of the potentials' logarithms for a particle, each times its exponent.

    It is -inf where phi is 0, and above `MOST` or NaN where it overflows.
    """
    total = 0.0
    for index, chosen in enumerate(potentials):
        asked_at = particle.place.asked_at[index]
        if particle.has_ended:
            value = particle.place.whole[index]
        else:
            value = 0.0 if asked_at is None else asked_at.values[index]
        total += chosen.exponent * value if chosen.exponent else 0.0  # of -inf, too
    return -math.inf if total < -MOST else total


def _names(req: "Req") -> str:
    return ", ".join(repr(chosen.name) for chosen in state_of(req).potentials)


def _end(req: "Req", failed: Failed) -> None:
    late, broken = HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INTERNAL_SERVER_ERROR
    end_request(req, failed.message, late if failed.is_late else broken)


def _is_first_rank() -> bool:
    if not parallel_state.model_parallel_is_initialized():
        return True
    return parallel_state.get_tp_group().rank_in_group == 0


def _of_first_rank(answers: Any) -> Any:
    """Broadcast the answers of the first rank, which alone queries."""
    if not parallel_state.model_parallel_is_initialized():
        return answers
    return parallel_state.get_tp_group().broadcast_object(answers)


MOST_STEPS = 25_000_000
"""Bytes of text, times instructions of their patterns, that one round may search for all requests:
0.3 s at worst (`options.answers`), usually 0.01."""

_LONG = (
    "A particle's text has {length} bytes and the answer_pattern {size} instructions; allowed: "
    f"{MOST_STEPS} of the one times the other. Ask for fewer tokens, or simplify the pattern: "
    "bounded repetitions and classes of letters are large."
)


class Votes(TextRule):
    """The majority votes of a batch.

    Args:
        answers: by group, the number of each particle's answer.
    """

    needs_host = True
    judges = True

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = answers

    @classmethod
    def applies(cls, req: "Req") -> bool:
        """Return whether a request selects its output by majority vote."""
        state = find_state(req)
        return state is not None and state.config.votes

    @classmethod
    def of(cls, texts: BatchTexts) -> "Votes":
        """Read the answers of groups in which all particles have ended; see `TextRule.of`."""
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
        """Return the answers by group; see `TextRule.verdicts`."""
        return {
            group: Verdict([None] * len(found), [True] * len(found), found)
            for group, found in self._answers.items()
        }


class _Reading:
    """The budget of text that one round may search for answers."""

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
            self._steps_left = 0  # later ones wait, too: a batch is searched in its order
            return False
        self._steps_left -= steps
        return True
