"""Query the potentials of requests, on the host.

A round queries the sequences that it starts from, in threads, while the device drafts, and takes
the values when drafts have been scored, just before they are weighed. A sequence that ends in a
round gets its value as a whole in the next: a group waits for it if all its particles have ended.

The sequences of a request form a tree below the output that they share, so that shared prefixes are
decoded and queried once. A node points to the last ancestor at which each potential was due.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from sglang.srt.managers.schedule_batch import Req

from sglang_smc.potentials.base import Text
from sglang_smc.potentials.runner import Call, MissingValue, Query
from sglang_smc.potentials.spec import PotentialSpec, Schedule
from sglang_smc.rules.base import BatchTexts, GroupScores, Scorer, decoder_of
from sglang_smc.smc.population import Population
from sglang_smc.state.failures import end_request
from sglang_smc.state.ranks import tp_group
from sglang_smc.state.request import find_state, state_of
from sglang_smc.state.texts import shared_ids, tails_of


@dataclass(eq=False, slots=True)
class Node:
    """A prefix of an output, in the tree of a request's sequences."""

    length: int  # tokens of output
    recent: tuple[int, ...]  # the last of these
    # By potential: the last node, this one included, at which it was due; None: not yet.
    due_at: "tuple[Node | None, ...]"
    # By potential, and whether the whole sequence ends here: log phi.
    values: dict[tuple[int, bool], float] = field(default_factory=dict)
    _children: "dict[int, Node]" = field(default_factory=dict)

    def child(self, token: int, tree: "PrefixTree") -> "Node":
        """Return the node one token further."""
        if token not in self._children:
            recent = (*self.recent[-tree.context :], token)
            node = self._children[token] = Node(self.length + 1, recent, ())
            node.due_at = tuple(
                node if schedule.is_due(node.length, recent, tree.decode) else before
                for schedule, before in zip(tree.schedules, self.due_at, strict=True)
            )
        return self._children[token]


@dataclass(eq=False)
class PrefixTree:
    """The tree of one request's sequences."""

    schedules: Sequence[Schedule]  # by potential
    decode: Callable[[Sequence[int]], str]
    prompt_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.context = max((schedule.context for schedule in self.schedules), default=0)
        self._shared = Node(0, (), (None,) * len(self.schedules))

    def nodes(self, shared: Sequence[int], tails: Sequence[Sequence[int]]) -> list[Node]:
        """Return the node at which each particle's sequence ends.

        Args:
            shared: output tokens that all particles share, which only grow from call to call.
            tails: of each particle, beyond these.
        """
        self._shared = self._walk(self._shared, shared[self._shared.length :])
        return [self._walk(self._shared, tail) for tail in tails]

    def _walk(self, node: Node, tokens: Sequence[int]) -> Node:
        for token in tokens:
            node = node.child(token, self)
        return node


MOST = 1e300
"""The largest log phi: differences of two are finite. Below -MOST, phi is 0."""

_TOO_LARGE = (
    "The potentials {names} with their exponents add up to {value:g} for a text; allowed: up to "
    "1e300. Lower an exponent, or fix the potential. Others are not affected."
)

_FORBIDDEN = (
    "The potentials {names} forbid the texts of all {num_particles} particles, behind {num_tokens} "
    "output tokens that these share. Ask for more particles, or loosen the potentials."
)


class _Particle(NamedTuple):
    """The sequence of a particle, as a round starts."""

    output_ids: tuple[int, ...]
    node: Node  # at which it ends
    has_ended: bool

    def due_at(self, index: int) -> Node | None:
        """Return the prefix of which a potential gives the value; None: it is not due yet."""
        return self.node if self.has_ended else self.node.due_at[index]

    def log_value(self, specs: Sequence[PotentialSpec]) -> float:
        """Return the sum of the potentials' logarithms, each times its exponent.

        It is -inf where phi is 0, and above `MOST` or NaN where it overflows.
        """
        total = 0.0
        for index, spec in enumerate(specs):
            node = self.due_at(index)
            if node is not None and spec.exponent:  # 0 times -inf, too, is 0
                total += spec.exponent * node.values[index, self.has_ended]
        return -math.inf if total < -MOST else total


class Potentials(Scorer):
    """The potentials of a batch; queries are under way once it is made."""

    def __init__(self, texts: BatchTexts) -> None:
        # By group, of a round alone; a particle of weight zero is None.
        self._reqs: dict[int, Req] = {}
        self._particles: dict[int, list[_Particle | None]] = {}
        # By the potential's name: queries, and where each one's value is stored.
        self._queries: dict[str, dict[tuple[Node, tuple[int, bool]], Query]] = {}
        if texts.population is not None:
            for group, req in enumerate(texts.reqs):
                if self.applies(req) and not (req.finished() or req.to_finish):
                    self._add(group, req, texts.population)
        self._ranks = tp_group()  # of which the first alone queries
        is_first = self._ranks is None or self._ranks.rank_in_group == 0
        self._calls = self._begin_calls() if is_first else {}

    def _add(self, group: int, req: Req, population: Population) -> None:
        """Add a request, with the queries that are due for it."""
        self._reqs[group] = req
        particles = self._particles[group] = _particles(req, population, group)
        for index, spec in enumerate(state_of(req).potentials):
            own = self._queries.setdefault(spec.name, {})
            own |= _queries_of(group, req, index, particles)

    @classmethod
    def applies(cls, req: Req) -> bool:
        state = find_state(req)
        return state is not None and bool(state.potentials)

    @classmethod
    def begin(cls, req: Req) -> None:
        """Make the tree; that of a retracted request stays valid."""
        state = state_of(req)
        if cls not in state.kept:
            schedules = [spec.schedule for spec in state.potentials]
            decode = decoder_of(req, skip_special_tokens=True)
            # Tokens of an image have ids of its content, which no tokenizer decodes.
            sees = req.multimodal_inputs is not None
            prompt = req.origin_input_ids_unpadded if sees else req.origin_input_ids
            state.kept[cls] = PrefixTree(schedules, decode, tuple(prompt))

    def result(self) -> dict[int, GroupScores]:
        calls = self._calls.items()
        found = {name: c if isinstance(c, MissingValue) else c.result() for name, c in calls}
        if self._ranks is not None:
            found = self._ranks.broadcast_object(found)
        for name, values in found.items():
            if isinstance(values, MissingValue):
                for req in self._reqs.values():
                    if any(spec.name == name for spec in state_of(req).potentials):
                        _end(req, values)
                continue
            queries = self._queries[name].items()
            for ((node, key), query), value in zip(queries, values, strict=True):
                if isinstance(value, MissingValue):
                    _end(self._reqs[query.owner], value)
                else:
                    node.values[key] = value
        return {group: self._scores(group, req) for group, req in self._reqs.items()}

    def _scores(self, group: int, req: Req) -> GroupScores:
        particles = self._particles[group]
        specs = state_of(req).potentials
        if req.to_finish:  # with an error: some values are missing
            return GroupScores.none(len(particles))
        log_values = [one and one.log_value(specs) for one in particles]
        for value in log_values:
            if value is not None and not value <= MOST:  # NaN, too
                _end(req, MissingValue(_TOO_LARGE.format(names=_names(req), value=value)))
                return GroupScores.none(len(particles))
        if all(value is None or value == -math.inf for value in log_values):
            self.end_stuck(req)  # before other rules, which are not the cause
        return GroupScores(log_values, [one is None or one.has_ended for one in particles])

    def _begin_calls(self) -> dict[str, Call | MissingValue]:
        """Start the queries, on the first rank of a tensor-parallel group: all must get the same.

        Returns:
            By the potential's name: the call under way, or why it is not queried. Left out where
            there is nothing to query.
        """
        runners = {
            runner.name: runner for req in self._reqs.values() for runner in state_of(req).runners
        }
        found: dict[str, Call | MissingValue] = {}
        for name, runner in runners.items():
            if refusal := runner.refusal():
                found[name] = refusal
            elif queries := self._queries[name]:
                found[name] = runner.submit(list(queries.values()))
        return found

    @classmethod
    def end_stuck(cls, req: Req) -> None:
        """End a request all of whose sequences potentials forbid."""
        message = _FORBIDDEN.format(
            names=_names(req),
            num_particles=state_of(req).config.num_particles,
            num_tokens=len(shared_ids(req)),
        )
        end_request(req, message, HTTPStatus.BAD_REQUEST)


def _particles(req: Req, population: Population, group: int) -> list[_Particle | None]:
    """Return one request's particles, None for absent ones and those of weight zero."""
    tree: PrefixTree = state_of(req).kept[Potentials]
    shared = shared_ids(req)
    tails = tails_of(req, population, group)
    ended = population.ended[group].tolist()
    weighs = (population.present[group] & population.log_weights[group].isfinite()).tolist()
    each = zip(tails, tree.nodes(shared, tails), ended, weighs, strict=True)
    return [
        _Particle((*shared, *tail), node, has_ended) if counts else None
        for tail, node, has_ended, counts in each
    ]


def _queries_of(
    group: int, req: Req, index: int, particles: list[_Particle | None]
) -> dict[tuple[Node, tuple[int, bool]], Query]:
    """Return the unknown values that one potential has to give, each sequence once."""
    state = state_of(req)
    tree: PrefixTree = state.kept[Potentials]
    found: dict[tuple[Node, tuple[int, bool]], Query] = {}
    for one in particles:
        node = one and one.due_at(index)
        if one is None or node is None:
            continue
        key = index, one.has_ended
        if key not in node.values and (node, key) not in found:
            output_ids = one.output_ids[: node.length]
            args = state.potentials[index].args
            text = Text(tree.prompt_ids, output_ids, args, tree.decode)
            found[node, key] = Query(text, one.has_ended, group)
    return found


def _names(req: Req) -> str:
    return ", ".join(repr(spec.name) for spec in state_of(req).potentials)


def _end(req: Req, missing: MissingValue) -> None:
    late = HTTPStatus.SERVICE_UNAVAILABLE
    broken = HTTPStatus.INTERNAL_SERVER_ERROR
    end_request(req, missing.message, late if missing.is_late else broken)
