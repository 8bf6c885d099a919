"""Potentials: what multiplies the target of a request, asked on the host while the device works.

A round asks about the texts that it starts from, in threads of their own, and takes the answers
when drafts are scored, just before these are weighed. So a text that ends in a round is judged as a
whole in the next: a group whose particles have all ended waits for that (`state.judged`).
"""

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sglang.srt.distributed import parallel_state

from sglang_smc.potentials.base import Text
from sglang_smc.potentials.calls import Call, Failed, Question
from sglang_smc.potentials.declared import Chosen
from sglang_smc.potentials.readings import Decode, Place, Readings
from sglang_smc.requests.failures import end_request
from sglang_smc.requests.state import find_state, settled_ids, state_of, tails_of
from sglang_smc.requests.text_rule import BatchTexts, TextRule, Verdict
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from transformers import PreTrainedTokenizerBase

MOST = 1e300
"""The largest log phi: differences of two are still numbers. What is below -MOST is phi = 0."""

_TOO_LARGE = (
    "The potentials {names} with their exponents add up to {value:g} for a text; allowed: up to "
    "1e300. Lower an exponent, or mend the potential. Others are not affected."
)

_FORBIDDEN = (
    "The potentials {names} forbid the texts of all {num_particles} particles, behind {num_tokens} "
    "output tokens that these share. Ask for more particles, or loosen the potentials."
)


class _Particle(NamedTuple):
    """The text of a particle, as a round starts."""

    output_ids: tuple[int, ...]
    place: Place  # where it ends
    has_ended: bool


class _Wanted(NamedTuple):
    """A value that is not known yet."""

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
    """The requests that name potentials.

    Args:
        reqs: by group.
        particles: of each of these, by their places; None for one that has died.
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
        """Whether a request names potentials."""
        state = find_state(req)
        return state is not None and bool(state.potentials)

    @classmethod
    def begin(cls, req: "Req") -> None:
        """See `TextRule.begin`: what is known of a text stays true when it is retracted."""
        state = state_of(req)
        if cls not in state.kept:
            schedules = [chosen.schedule for chosen in state.potentials]
            prompt_ids = tuple(req.origin_input_ids)
            state.kept[cls] = Readings(schedules, decoder_of(req), prompt_ids)

    @classmethod
    def of(cls, texts: BatchTexts) -> "Potentials":
        """See `TextRule.of`: begins to ask."""
        population = texts.population
        if population is None:
            return cls({}, {})
        reqs = {group: req for group, req in enumerate(texts.reqs) if cls._asks(req)}
        return cls(reqs, {group: _particles(req, population, group) for group, req in reqs.items()})

    @classmethod
    def _asks(cls, req: "Req") -> bool:
        return cls.applies(req) and not (req.finished() or req.to_finish)

    def verdicts(self) -> dict[int, Verdict]:
        """See `TextRule.verdicts`: waits for what was asked."""
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
        """End the requests that name a potential which is not asked now."""
        for req in self._reqs.values():
            if any(chosen.name == name for chosen in state_of(req).potentials):
                _end(req, failed)

    def _verdict(self, group: int, req: "Req") -> Verdict:
        particles, chosen = self._particles[group], state_of(req).potentials
        if req.to_finish:  # with an error; what there is of values is not all
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
        """Ask, on the first rank of a tensor-parallel group: all must hear the same.

        Returns:
            By the potential's name: the call under way, or why it is not asked. Left out where
            there is nothing to ask.
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
        """See `TextRule.end_stuck`: they may have forbidden all texts."""
        state = state_of(req)
        message = _FORBIDDEN.format(
            names=_names(req),
            num_particles=state.config.num_particles,
            num_tokens=len(settled_ids(req)),
        )
        end_request(req, message, HTTPStatus.BAD_REQUEST)
        return True


def decoder_of(req: "Req") -> Decode:
    """How a request's tokens read, special ones left out."""
    # SGLang declares it as None; a server without one has no potentials.
    tokenizer = cast("PreTrainedTokenizerBase", req.tokenizer)

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str), "it is a list for a list of texts alone"
        return text

    return decode


def _particles(req: "Req", population: Population, group: int) -> list[_Particle | None]:
    """One request's particles, None for those that are not there, or weigh nothing."""
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
    """What one request's potentials are to be asked, each text once."""
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

    It is -inf where phi is 0, and above `MOST` or NaN where floats end.
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
    """What the first rank has: it alone asks."""
    if not parallel_state.model_parallel_is_initialized():
        return answers
    return parallel_state.get_tp_group().broadcast_object(answers)
