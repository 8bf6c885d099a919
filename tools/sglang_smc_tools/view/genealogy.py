"""Convert a trace to segments of text in lanes, linked by ancestry, without drawing them.

A lane is a particle's index. A particle's text is read backwards: its last segment, that segment's
parent up to the segment's start, and so on. `tests/view` compares this with a replay.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from sglang_smc.state.trace import Trace, TracedRound

FIRST = "first"
DRAFTED = "drafted"
BONUS = "bonus"


class Segment(msgspec.Struct, kw_only=True, array_like=True):
    """Tokens that one particle appends in one step, in its lane.

    A ``fate`` is the reason why no segment continues this one to its end: `dead` (weight 0),
    `resampled`, `verification`, `narrowed`, `drawn` (another particle was drawn as the answer),
    `resized`, `retracted`, `failure`, or `end` at the end of the trace.
    """

    parent: int | None  # the segment that it continues; None at the prompt's end
    lane: int
    start: int  # position of its first token, in output; only the parent's earlier tokens count
    tokens: list[int]  # empty if a finished text moves to another lane
    kind: str  # `FIRST`, prefill's token; `DRAFTED`; or `BONUS`
    round: int
    before: float  # the particle's normalised weight, 0 to 1, at the segment's start
    after: float  # and at its end
    log_weight: float | None  # unnormalised, at its end; None for weight 0
    rejected: list[int] = []  # tokens drafted behind it that were not kept
    fate: str | None = None  # None if it is continued, and for whole segments of the answer
    surviving: int = 0  # number of its tokens that are in the answer by this line of descent
    log_potential: float | None = 0.0  # of the text up to its end; 0 without one, None if forbidden

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Step(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One round, on the axis of output positions."""

    start: int  # position of its first draft token
    kept_to: int  # position behind the last kept column
    end: int  # position behind the bonus tokens
    num_particles: int
    ess: float
    log_block_evidence: float | None
    log_evidence: float | None
    cut: str
    resampled: bool
    gone: int  # number of particles that ended by narrowing
    resized: bool
    retracted: bool
    emitted_to: int  # number of tokens emitted so far, after this round


class Genealogy(msgspec.Struct, frozen=True, kw_only=True):
    """All segments of one answer, parents first."""

    num_lanes: int
    length: int  # positions that any particle or draft reaches
    segments: list[Segment]
    steps: list[Step]
    heads: list[int]  # each particle's last segment at the end of the trace
    answer: list[int]  # the emitted tokens


def genealogy(trace: Trace) -> Genealogy:
    """Build the genealogy that a trace holds.

    Raises ValueError if the trace has no round.
    """
    if not trace.rounds:
        raise ValueError("the trace has no round: the answer was prefill's token alone")
    growth = _Growth(verifies=trace.mode != "smc")
    for number, traced in enumerate(trace.rounds):
        growth.play(number, traced, is_last=number == len(trace.rounds) - 1)
    for token in trace.emitted_after:
        growth.begin(len(trace.rounds) - 1, [token] * len(growth.heads))
    return growth.result()


def lineage(segment: int, segments: Sequence[Segment]) -> Iterator[int]:
    """Yield a segment and its ancestors, the youngest first."""
    at: int | None = segment
    while at is not None:
        yield at
        at = segments[at].parent


def shares(log_weights: list[float | None]) -> list[float]:
    """Return the normalised weights; all 0 if no particle is alive."""
    alive = [value for value in log_weights if value is not None]
    if not alive:
        return [0.0] * len(log_weights)
    top = max(alive)
    weights = [0.0 if value is None else math.exp(value - top) for value in log_weights]
    total = sum(weights)
    return [weight / total for weight in weights]


class _Growth:
    """Segments as rounds append them, and the last segment of each particle."""

    def __init__(self, *, verifies: bool) -> None:
        self.verifies = verifies
        self.segments: list[Segment] = []
        self.wrote: list[int] = []  # of each segment: the last one of its text that has a token
        self.steps: list[Step] = []
        self.heads: list[int] = []
        self.emitted: list[int] = []

    @property
    def ends(self) -> list[int]:
        """Return the length of each particle's text."""
        return [self.segments[head].end for head in self.heads]

    def play(self, number: int, traced: TracedRound, *, is_last: bool) -> None:
        retracted = traced.begins is not None and (number > 0 or bool(traced.emitted_before))
        for token in traced.emitted_before:
            self.begin(number, [token])
        if traced.begins is not None:
            self.begin(number, traced.begins)
        if traced.resized_from is not None:
            self.descend(traced.resized_from, "resized")
        if traced.log_potentials is not None:
            for head, value in zip(self.heads, traced.log_potentials, strict=True):
                if value != 0:
                    self.segments[self.wrote[head]].log_potential = value
        weights = shares(traced.log_weights)
        start = min(self.ends)
        self.draft(number, traced, weights)
        kept_to = max(self.ends)
        self.hand_down(traced, weights)
        self.add_bonus(number, traced, weights)
        end = max(self.ends)
        gone = 0
        if traced.narrowed_to is not None:
            gone = len(traced.narrowed_to) - len(set(traced.narrowed_to))
            self.descend(traced.narrowed_to, "drawn" if is_last else "narrowed")
        self.emitted += traced.emitted
        same = ("ess", "log_block_evidence", "log_evidence", "cut", "resampled")
        fields = {name: getattr(traced, name) for name in same}
        fields |= {"start": start, "kept_to": kept_to, "end": end, "gone": gone}
        fields |= {"num_particles": len(weights), "retracted": retracted}
        fields |= {"resized": traced.resized_from is not None, "emitted_to": len(self.emitted)}
        self.steps.append(Step(**fields))

    def begin(self, number: int, tokens: list[int]) -> None:
        """Start all particles anew behind a prefill, after the emitted tokens."""
        start = len(self.emitted)
        parent = None
        self.end(self.heads, "retracted")
        if self.heads and start:
            line = lineage(self.heads[0], self.segments)
            parent = next(at for at in line if self.segments[at].start < start)
        share = 1 / len(tokens)
        fields = {"parent": parent, "start": start, "kind": FIRST, "round": number}
        fields |= {"before": share, "after": share, "log_weight": 0.0}
        self.heads = [
            self.add(lane=lane, tokens=[token], **fields) for lane, token in enumerate(tokens)
        ]
        if len(set(tokens)) == 1:
            self.emitted.append(tokens[0])

    def draft(self, number: int, traced: TracedRound, weights: list[float]) -> None:
        """Append each particle's draft, split into kept and rejected tokens."""
        before = shares(traced.log_weights_before)
        for lane, drafted in enumerate(traced.drafted):
            loses = self.verifies and lane not in traced.ancestors
            kept = 0 if loses else min(traced.kept[lane], len(drafted))
            shown = {"before": before[lane], "after": weights[lane]}
            shown |= {"log_weight": traced.log_weights[lane], "rejected": drafted[kept:]}
            self.extend(lane, drafted[:kept], kind=DRAFTED, round=number, **shown)

    def hand_down(self, traced: TracedRound, weights: list[float]) -> None:
        if traced.cut == "failure":
            self.end(self.heads, "failure")
        dead = {head for head, weight in zip(self.heads, weights, strict=True) if weight == 0}
        fate = "verification" if self.verifies else "resampled"
        kept = {self.heads[ancestor] for ancestor in traced.ancestors}
        self.end(dead - kept, "dead" if fate == "resampled" else fate)
        self.descend(traced.ancestors, fate)

    def add_bonus(self, number: int, traced: TracedRound, weights: list[float]) -> None:
        if traced.resampled:
            weights = [1 / len(weights)] * len(weights)
        # Powers and masks weigh bonus tokens, too; behind a narrowing the round has no weights.
        is_told = traced.narrowed_to is None
        weights_after = shares(traced.log_weights_after) if is_told else weights
        for lane, token in enumerate(traced.bonus):
            log_weight = None if traced.narrowed_to else traced.log_weights_after[lane]
            shown = {
                "before": weights[lane],
                "after": weights_after[lane],
                "log_weight": log_weight,
            }
            tokens = [] if token is None else [token]
            self.extend(lane, tokens, kind=BONUS, round=number, **shown)

    def extend(self, lane: int, tokens: list[int], **fields: Any) -> None:
        """Append a segment to a particle, unless it neither writes nor moves to another lane."""
        head = self.heads[lane]
        here = self.segments[head]
        if tokens or fields.get("rejected") or here.lane != lane:
            fields |= {"parent": head, "lane": lane, "start": here.end}
            self.heads[lane] = self.add(tokens=tokens, **fields)

    def descend(self, by: list[int], fate: str) -> None:
        """Replace particles by copies of their ancestors; those without a copy end."""
        heads = [self.heads[who] for who in by]
        self.end(set(self.heads) - set(heads), fate)
        self.heads = heads

    def end(self, heads: Iterable[int], fate: str) -> None:
        """Set the fate of segments that have none."""
        for head in heads:
            self.segments[head].fate = self.segments[head].fate or fate

    def add(self, **fields: Any) -> int:
        at = len(self.segments)
        segment = Segment(**fields)
        self.segments.append(segment)
        is_own = segment.tokens or segment.parent is None
        self.wrote.append(at if is_own else self.wrote[segment.parent or 0])
        return at

    def result(self) -> Genealogy:
        self.end(self.heads, "end")
        end = len(self.emitted)
        for at in lineage(self.heads[0], self.segments):
            here = self.segments[at]
            here.surviving = max(0, min(end, here.end) - here.start)
            end = min(end, here.start)
            # Except of the youngest, which no segment continues.
            if at != self.heads[0] and here.surviving == len(here.tokens):
                here.fate = None
        return Genealogy(
            num_lanes=max(here.lane for here in self.segments) + 1,
            length=max(here.end + len(here.rejected) for here in self.segments),
            segments=self.segments,
            steps=self.steps,
            heads=self.heads,
            answer=self.emitted,
        )
