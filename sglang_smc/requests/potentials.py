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

_FORBIDDEN = (
    "The potentials {names} forbid the texts of all {num_particles} particles, behind {num_tokens} "
    "output tokens that these share. Ask for more particles, or loosen the potentials."
)


class _Particle(NamedTuple):
    """The text of a particle, as a round starts."""

    output_ids: list[int]
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
        self._calls = self._begin_calls()

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
            state.kept[cls] = Readings(schedules, decoder_of(req))

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
        answers = _of_first_rank([call.answers() for call in self._calls])
        for wanted, of_potential in zip(self._wanted.values(), answers, strict=True):
            for one, answer in zip(wanted, of_potential, strict=True):
                if isinstance(answer, Failed):
                    _end(self._reqs[one.group], answer)
                else:
                    one.keep(answer)
        return {group: self._verdict(group, req) for group, req in self._reqs.items()}

    def _verdict(self, group: int, req: "Req") -> Verdict:
        particles, chosen = self._particles[group], state_of(req).potentials
        if req.to_finish:  # with an error; what there is of values is not all
            return Verdict.none(len(particles))
        log_values = [one and _log_value(one, chosen) for one in particles]
        if all(value is None or value == -math.inf for value in log_values):
            self.end_stuck(req)  # before other rules, which are not the cause
        return Verdict(
            log_values=log_values,
            complete=[one is None or one.has_ended for one in particles],
        )

    def _begin_calls(self) -> list[Call]:
        """Ask, on the first rank of a tensor-parallel group: all must hear the same."""
        if not _is_first_rank():
            return []
        callers = {
            caller.name: caller for req in self._reqs.values() for caller in state_of(req).callers
        }
        return [
            callers[name].ask([one.question for one in wanted])
            for name, wanted in self._wanted.items()
        ]

    @classmethod
    def end_stuck(cls, req: "Req") -> bool:
        """See `TextRule.end_stuck`: they may have forbidden all texts."""
        state = state_of(req)
        message = _FORBIDDEN.format(
            names=", ".join(repr(chosen.name) for chosen in state.potentials),
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
        _Particle([*settled, *tail], place, has_ended) if counts else None
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
                text = _text(req, one.output_ids[: place.length], chosen)
                wanted = _Wanted(group, index, place, one.has_ended, text)
                found[index, id(place)] = chosen.name, wanted
    return list(found.values())


def _text(req: "Req", output_ids: list[int], chosen: Chosen) -> Text:
    return Text(req.origin_input_ids, output_ids, chosen.args, decoder_of(req))


def _log_value(particle: _Particle, potentials: Sequence[Chosen]) -> float:
    """The sum of what potentials say of a particle, each to its exponent."""
    total = 0.0
    for index, chosen in enumerate(potentials):
        asked_at = particle.place.asked_at[index]
        if particle.has_ended:
            value = particle.place.whole[index]
        else:
            value = 0.0 if asked_at is None else asked_at.values[index]
        total += chosen.exponent * value if chosen.exponent else 0.0  # of -inf, too
    return total


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
