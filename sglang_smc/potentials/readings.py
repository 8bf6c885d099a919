"""Which beginnings of particles' texts a request's potentials are asked about.

A request's texts are kept as a tree from the text that all share on, so that what particles have in
common is read, and asked about, once. A place in it knows the last place above at which each
potential was to be asked.
"""

from collections.abc import Callable, Sequence

from sglang_smc.potentials.asked import Schedule

CONTEXT = 8
"""Tokens before a new one with which it is decoded, beside those that a delimiter can span."""

Decode = Callable[[Sequence[int]], str]


class Place:
    """A beginning of a text."""

    __slots__ = ("_longer", "asked_at", "length", "recent", "values", "whole")

    def __init__(
        self, length: int, recent: tuple[int, ...], asked_at: "tuple[Place | None, ...]"
    ) -> None:
        self.length = length  # tokens of output
        self.recent = recent  # the last of these
        # By potential: the last place, maybe this, that it is asked about; None: nowhere yet.
        self.asked_at = asked_at
        self.values: dict[int, float] = {}  # by potential: what it has said of this beginning
        self.whole: dict[int, float] = {}  # and of this text, where it ends here
        self._longer: dict[int, Place] = {}

    def then(self, token: int, schedules: Sequence[Schedule], decode: Decode) -> "Place":
        """The place one token on."""
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
    """Tokens that tell whether a delimiter ends at the next one: each has a character or more."""
    texts = (each.delimiter for each in schedules if isinstance(each.delimiter, str))
    return max((len(text.encode()) for text in texts), default=0) + CONTEXT


def _falls_on(schedule: Schedule, place: Place, token: int, decode: Decode) -> bool:
    if schedule.is_each_round:
        return True  # wherever a round begins
    if not isinstance(schedule.delimiter, str):
        return schedule.falls_on(place.length, token)
    before = decode(place.recent[:-1]).count(schedule.delimiter)
    return decode(place.recent).count(schedule.delimiter) > before


class Readings:
    """The places of one request's texts.

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
        """Where each particle's text ends.

        Args:
            settled: output tokens that all share, which only grow from call to call.
            tails: of each particle, beyond these.
        """
        self._settled = self._walk(self._settled, settled[self._settled.length :])
        return [self._walk(self._settled, tail) for tail in tails]

    def _walk(self, place: Place, tokens: Sequence[int]) -> Place:
        for token in tokens:
            place = place.then(token, self._schedules, self._decode)
        return place
