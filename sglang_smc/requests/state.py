"""The host's view of each request: seed, options, sizes, counters, and whether its text is open.

It hangs on SGLang's request object, as `smc_state`, and goes when that goes; it outlives a
retraction. The particles' texts, weights and slots are on the device.
"""

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.memory.arena import remaining
from sglang_smc.options.budget import Budget, apply_budget, union
from sglang_smc.options.dial import Dial
from sglang_smc.options.request import RequestConfig, config_of, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials.calls import Caller
from sglang_smc.potentials.declared import Chosen, choose
from sglang_smc.requests.failures import end_request
from sglang_smc.requests.open_token import OpenToken
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.randomness import derive_seed
from sglang_smc.state.counters import META_PREFIX, Counters, meta_info, zero_counters
from sglang_smc.state.settings import TableEntry, stop_tokens
from sglang_smc.state.watched import Answer
from sglang_smc.upstream import kv_of
from sglang_smc.view.record import RoundRecord, Trace

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


_WATCHED = {name: Counters._fields.index(name) for name in NAMES}


class RequestState(msgspec.Struct):
    """What is known of one request on the host."""

    seed: int
    config: RequestConfig  # what it asked for
    counters: list[float]
    # What its last round ran with, and what the next one will: less where the server adapts.
    last: RequestConfig
    now: RequestConfig
    budget: Budget | None = None  # that bounds the next round
    arena: tuple[int, int] = (0, 0)  # from the end of the text that the host knew, when reserved
    open_token: OpenToken = msgspec.field(default_factory=OpenToken)
    has_lost_tails: bool = False  # a retraction dropped tokens that the evidence has counted
    num_replayed: int = 0  # rounds that were graphs
    last_chunk: float | None = None  # when its stream had new tokens last, by the monitor's clock
    first_log_sum: float = 0.0  # what the weights gained at the first token; in no counter yet
    particles: list[dict[str, Any]] | None = None  # all of them, as they stood at the end
    has_ended: bool = False  # and the server's own figures know it
    potentials: tuple[Chosen, ...] = ()  # that multiply its target
    callers: tuple[Caller, ...] = ()  # who asks each of these
    rounds: list[RoundRecord] = []  # where it wants a trace
    is_fresh: bool = False  # no round has been launched behind its last prefill
    num_prefilled: int = 0  # tokens of its output that the last prefill read
    untold: list[int] = []  # of these the last, which a trace has in no round so far
    kept: dict[type, Any] = {}  # what each rule of its text has to remember, by the rule

    @classmethod
    def of(cls, seed: int, config: RequestConfig) -> "RequestState":
        """The state of a request that has just come."""
        return cls(seed, config, zero_counters(config.num_particles), config, config)

    @property
    def sizes(self) -> Budget:
        """N and K of its last round, or of the one that is prepared."""
        return Budget(self.now.num_particles, self.now.num_steps)

    def span(self, budget: Budget | None) -> RequestConfig:
        """What memory must hold as the next round begins on ``budget``, and as it ends."""
        return union(self.now, apply_budget(self.config, budget))

    def begin(self, budget: Budget | None, output_ids: Sequence[int]) -> None:
        """Let particles begin anew on ``budget``, behind an output that prefill reads."""
        self.budget, self.is_fresh = budget, True
        self.last = self.now = apply_budget(self.config, budget)
        self.num_prefilled, self.untold = len(output_ids), self._untold(output_ids)
        self.particles = None

    def _untold(self, output_ids: Sequence[int]) -> list[int]:
        """Return the tokens behind those that the rounds of a trace have."""
        if not self.config.trace:
            return []
        return list(output_ids[sum(len(record.told) for record in self.rounds) :])

    def step_to(self, budget: Budget | None) -> None:
        """Let the next round run on ``budget``."""
        self.last = self.now
        if budget != self.budget:
            self.budget, self.now = budget, apply_budget(self.config, budget)

    def take_start(self) -> bool:
        """Whether the round that is being launched is the first behind a prefill."""
        was_fresh, self.is_fresh = self.is_fresh, False
        return was_fresh

    def take(self, totals: list[float], replayed: bool) -> None:
        """Note what the device has counted by the end of a round, and whether a graph played it."""
        self.counters, self.first_log_sum = totals, 0.0
        self.num_replayed += replayed

    def count_nan(self) -> None:
        """Note that prefill found logits that mean nothing; the device counts rounds alone."""
        place = Counters._fields.index("nan_ct")
        self.counters = [count + (i == place) for i, count in enumerate(self.counters)]

    def answer(self) -> Answer:
        """What was watched of its text."""
        watched = {name: self.counters[place] for name, place in _WATCHED.items()}
        return Answer(self.config.mode, self.config.covering, **watched)

    def progress(self, rid: str, num_tokens: int) -> dict[str, Any]:
        """What a look at the running server tells of it, of all its rounds so far."""
        counters = Counters._make(self.counters)
        rounds, weighs = counters.rounds_ct, self.now.weighs
        return {
            "rid": rid,
            "output_tokens": num_tokens,
            "mode": self.now.mode,
            "num_particles": self.now.num_particles,
            "num_steps": self.now.num_steps,
            "rounds": int(rounds),
            "tokens_per_pass": num_tokens / rounds if rounds else None,
            "ess_ratio": counters.ess_sum / counters.particles_sum if rounds and weighs else None,
            "resample_rate": counters.resample_ct / rounds if rounds else None,
        }

    def trace(self, prompt_length: int, output_ids: Sequence[int]) -> dict[str, Any]:
        """Return what its particles did behind so many tokens, as JSON has it: a `Trace`."""
        trace = Trace(
            mode=self.config.mode,
            num_particles=self.config.num_particles,
            num_steps=self.config.num_steps,
            prompt_length=prompt_length,
            rounds=self.rounds,
            emitted_after=self._untold(output_ids),
        )
        return {"version": trace.version, **msgspec.to_builtins(trace)}

    def meta_info(self, output_ids: list[int]) -> dict[str, Any]:
        """The `meta_info` fields of the finished request, but for its trace."""
        log_evidence = self.counters[-1] + self.first_log_sum
        totals = [*self.counters[:-1], log_evidence]
        fields = meta_info(totals, self.config, self.num_replayed)
        if self.has_lost_tails:
            fields[META_PREFIX + "log_evidence"] = None
        if self.config.return_particles:
            fields[META_PREFIX + "particles"] = self.particles or self._equal(output_ids)
        return fields

    def _equal(self, output_ids: list[int]) -> list[dict[str, Any]] | None:
        """Return the particles of a text that ended with the token they all began with."""
        if len(output_ids) != self.num_prefilled + 1 or self.open_token.is_open:
            return None  # aborted on the way
        num_particles = self.config.num_particles
        weight = 1.0 / num_particles
        return [as_particle(list(output_ids), weight, 0.0) for _ in range(num_particles)]


def as_particle(output_ids: list[int], weight: float, log_weight: float) -> dict[str, Any]:
    """How `meta_info` shows a particle."""
    return {"output_ids": output_ids, "weight": weight, "log_weight": log_weight}


class Start(NamedTuple):
    """What the device needs to begin a request, or to begin it again."""

    entry: TableEntry
    num_emitted: int
    counters: list[float]


class RequestStates:
    """Begins requests and numbers those that bring no seed of their own.

    Args:
        config: the server's.
        random_seed: the server's; seeds of requests that bring none follow from it.
        dial: what turns their tilts into evidence thresholds.
        callers: who asks the server's potentials, by their names.
    """

    def __init__(
        self,
        config: SMCConfig,
        random_seed: int,
        dial: Dial | None = None,
        callers: Mapping[str, Caller] = MappingProxyType({}),
    ) -> None:
        self._config = config
        self._callers = callers
        self._dial = dial or Dial()
        self._random_seed = random_seed
        self._num_seeded = 0

    @classmethod
    def of_replica(
        cls,
        config: SMCConfig,
        random_seed: int,
        dp_rank: int | None,
        dial: Dial,
        callers: Mapping[str, Caller],
    ) -> "RequestStates":
        """The states of a data-parallel replica: all number alike, and must not draw alike."""
        seed = derive_seed(random_seed, dp_rank) if dp_rank else random_seed
        return cls(config, seed, dial, callers)

    def begin(self, reqs: "list[Req]", budget: Budget | None = None) -> list[Start]:
        """Open or reopen requests as they are prefilled, in batch order, on ``budget``."""
        return [self._begin(req, budget) for req in reqs]

    def _begin(self, req: "Req", budget: Budget | None) -> Start:
        state = find_state(req)
        if state is None:
            asked = config_of(self._config, req)
            state = RequestState.of(self._seed(req), self._dial.settled(asked))
            self._give_potentials(req, state)
            req.smc_state = state  # pyright: ignore[reportAttributeAccessIssue] -- ours
        state.begin(budget, req.output_ids)
        # For p itself what is dropped has a factor of mean 1; for other targets it has not.
        state.has_lost_tails |= not state.config.is_normalized and req.retraction_count > 0
        is_last = remaining(req) <= 1
        shared = state.config.is_normalized or (is_last and not state.potentials)
        state.open_token.begin(None if shared else len(req.output_ids))
        # A retracted request's particles are gone: what follows its text is drawn anew.
        seed = derive_seed(state.seed, req.retraction_count)
        return Start(_entry(req, seed, state.config), len(req.output_ids), state.counters)

    def _give_potentials(self, req: "Req", state: RequestState) -> None:
        """Note the potentials that a request names, which were checked as it came in.

        One whose `Args` accepted it there, and raise here, ends the request.
        """
        asked = state.config.potentials
        known = {name: caller.potential for name, caller in self._callers.items()}
        try:
            state.potentials = tuple(choose(each, known) for each in asked)
        except ValueError as error:
            end_request(req, f"The request has {error}", HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        state.callers = tuple(self._callers[each.name] for each in asked)

    def padding(self) -> TableEntry:
        """What SGLang's padding row asks for: nothing, by the server's settings."""
        params = SamplingParams(max_new_tokens=1)
        return TableEntry(0, 0, params, request_config(self._config, None), frozenset())

    def note_first(self, reqs: "list[Req]", log_sums: torch.Tensor) -> None:
        """Note what first tokens ``[G]`` weigh: nothing, if p itself is the target.

        An answer may end with that token, before the device has counted anything; not so where
        nothing could be drawn, whose log is infinite.
        """
        states = [state_of(req) for req in reqs]
        if all(state.config.is_normalized for state in states):
            return
        for state, log_sum in zip(states, log_sums.tolist(), strict=True):
            if log_sum != -math.inf:
                state.first_log_sum = log_sum

    def _seed(self, req: "Req") -> int:
        if req.sampling_params.sampling_seed is not None:
            return req.sampling_params.sampling_seed
        self._num_seeded += 1
        return derive_seed(self._random_seed, self._num_seeded)


def find_state(req: "Req") -> RequestState | None:
    """The state of a request; None for one that SMC has not begun, or never will."""
    return req.__dict__.get("smc_state")


def state_of(req: "Req") -> RequestState:
    """The state of a request that decodes."""
    return req.smc_state  # pyright: ignore[reportAttributeAccessIssue] -- ours


def has_open_token(req: "Req") -> bool:
    """Whether the newest output token stands in for one that the particles differ in."""
    state = find_state(req)
    return state is not None and state.open_token.is_open


def settled_ids(req: "Req") -> list[int]:
    """The output tokens that all particles share."""
    state = find_state(req)
    return list(req.output_ids[: state.open_token.place if state is not None else None])


class Tails(Protocol):
    """Texts of particles: a `Population`, or what is kept of one."""

    @property
    def last_emitted(self) -> torch.Tensor: ...  # [G, N]

    @property
    def tokens(self) -> torch.Tensor: ...  # [G, N, T]

    @property
    def lengths(self) -> torch.Tensor: ...  # [G, N]


def tails_of(req: "Req", population: Tails, group: int) -> list[list[int]]:
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


def publish(req: "Req") -> None:
    """Give a finished request's totals to SGLang's streamer, which takes them to `meta_info`."""
    state = find_state(req)
    if state is not None and req.finished():
        fields = state.meta_info(list(req.output_ids))
        if state.config.trace:
            fields[META_PREFIX + "trace"] = state.trace(len(req.origin_input_ids), settled_ids(req))
        req.customized_info = {name: _Whole([value]) for name, value in fields.items()}


class _Whole(list):
    """A list of one that every slice leaves whole.

    The streamer slices such lists by output token, one element each, but a total belongs
    to the whole text.
    """

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)


def _entry(req: "Req", seed: int, config: RequestConfig) -> TableEntry:
    params = req.sampling_params
    row = kv_of(req).req_pool_idx
    assert row is not None, "SGLang gives a request its row before its prefill"
    assert params.max_new_tokens is not None and req.vocab_size is not None, "set as it comes in"
    stops = stop_tokens(params.stop_token_ids, req.eos_token_ids, req.tokenizer, req.vocab_size)
    return TableEntry(row, seed, params, config, stops)
