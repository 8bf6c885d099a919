"""Hold the host's state of each request: seed, options, sizes, counters, and its first token.

It is the attribute `smc_state` of SGLang's request object, and survives a retraction. The
particles' sequences, weights and slots are on the device.
"""

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.kv.arena import arena, remaining
from sglang_smc.options.policy import Dial
from sglang_smc.options.request import (
    OFF,
    Budget,
    RequestConfig,
    apply_budget,
    config_of,
    union,
)
from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials.runner import PotentialRunner
from sglang_smc.potentials.spec import PotentialSpec
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.randomness import derive_seed
from sglang_smc.smc.settings import OF_PLAIN, Need
from sglang_smc.state.correct_drafts import CorrectDrafts
from sglang_smc.state.failures import end_request
from sglang_smc.state.fidelity import AnswerFidelity
from sglang_smc.state.metrics import META_PREFIX, Counters, meta_info, zero_counters
from sglang_smc.state.open_token import OpenToken
from sglang_smc.state.settings import Start, stop_tokens
from sglang_smc.state.thoughts import Count
from sglang_smc.state.trace import Trace, TracedRound
from sglang_smc.upstream import allocated, kv_of

_WATCHED = {name: Counters._fields.index(name) for name in NAMES}


class RequestState(msgspec.Struct):
    """State of one request on the host."""

    seed: int
    config: RequestConfig  # its options
    counters: list[float]
    # Options of its last round and of the next: smaller N and K where the server adapts.
    config_before: RequestConfig
    config_now: RequestConfig
    budget: Budget | None = None  # that bounds the next round
    needs: frozenset[Need] | None = None  # on it, once a round has found them
    num_passes: int = 1  # of the target in the next round, if it decodes plainly
    arena: tuple[int, int] = (0, 0)  # after the end of the sequence on the host, when reserved
    open_token: OpenToken = msgspec.field(default_factory=OpenToken)
    has_lost_tails: bool = False  # a retraction dropped tokens that the evidence has counted
    num_replayed: int = 0  # rounds that replayed a CUDA graph
    last_chunk: float | None = None  # time of its stream's last new tokens, by the monitor's clock
    first_log_sum: float = 0.0  # log-weight of the first token, while in no counter yet
    particles: list[dict[str, Any]] | None = None  # all of them, before the final draw
    has_ended: bool = False  # its answer is counted in the server's totals
    potentials: tuple[PotentialSpec, ...] = ()  # that multiply its target, resolved
    runners: tuple[PotentialRunner, ...] = ()  # that call each of these
    rounds: list[TracedRound] = msgspec.field(default_factory=list)  # of its trace
    is_fresh: bool = False  # no round has been launched since its last prefill
    num_prefilled: int = 0  # tokens of its output that the last prefill read
    # The last of these, which are in no round of the trace yet.
    untraced: list[int] = msgspec.field(default_factory=list)
    # State of each rule of the request, by the rule's class.
    kept: dict[type, Any] = msgspec.field(default_factory=dict)
    was_reduced: bool = False  # some round verified, where the budget left one particle
    drafts: CorrectDrafts = msgspec.field(default_factory=CorrectDrafts)
    num_read: int | None = None  # tokens that the draft has read, where it has skipped some
    count_thoughts: Count | None = None  # SGLang's counter, once it has counted a token

    @classmethod
    def of(cls, seed: int, config: RequestConfig) -> "RequestState":
        return cls(seed, config, zero_counters(config.num_particles), config, config)

    @property
    def sizes(self) -> Budget:
        """Return N and K of its last round, or of the one that is prepared."""
        return Budget(self.config_now.num_particles, self.config_now.num_steps)

    def span(self, budget: Budget | None) -> RequestConfig:
        """Return the sizes for which the next round on ``budget`` needs memory."""
        if budget == self.budget:
            return self.config_now
        return union(self.config_now, apply_budget(self.config, budget))

    def begin(self, budget: Budget | None, output_ids: Sequence[int]) -> None:
        """Start new particles on ``budget``, after the output that prefill reads."""
        self._set_budget(budget)
        self.config_before = self.config_now
        self.is_fresh = True
        self.num_prefilled = len(output_ids)
        self.untraced = self._untraced(output_ids)
        self.particles = self.num_read = None
        self.drafts.cut()

    def _untraced(self, output_ids: Sequence[int]) -> list[int]:
        """Return the output tokens after those in the rounds of the trace."""
        if not self.config.trace:
            return []
        return list(output_ids[sum(len(traced.tokens) for traced in self.rounds) :])

    def step_to(self, budget: Budget | None) -> None:
        """Set the next round's N and K by ``budget``."""
        self.config_before = self.config_now
        if budget != self.budget:
            self._set_budget(budget)

    def _set_budget(self, budget: Budget | None) -> None:
        self.budget = budget
        self.config_now = apply_budget(self.config, budget)
        self.needs = None
        self.was_reduced |= self.config_now.mode != self.config.mode

    @property
    def decodes_plainly(self) -> bool:
        """Return whether its last round, and the next on the same budget, are of plain decoding."""
        return self.sizes == OFF and self.needs is not None and self.needs <= OF_PLAIN

    def take_start(self) -> bool:
        """Return whether the next round is the first after a prefill, and clear the flag."""
        was_fresh = self.is_fresh
        self.is_fresh = False
        return was_fresh

    def take(self, totals: list[float], replayed: bool) -> None:
        """Store the device's totals after a round, and count it if a CUDA graph was replayed."""
        self.counters = totals
        self.first_log_sum = 0.0
        self.num_replayed += replayed

    def count_nan(self) -> None:
        """Count invalid logits in prefill; the device counts rounds only."""
        place = Counters._fields.index("nan_ct")
        self.counters = [count + (i == place) for i, count in enumerate(self.counters)]

    def answer(self) -> AnswerFidelity:
        """Return the fidelity measurements of its sequence."""
        watched = {name: self.counters[place] for name, place in _WATCHED.items()}
        threshold = math.inf if self.was_reduced else self.config.effective_evidence_threshold
        return AnswerFidelity(self.config.mode, threshold, **watched)

    def progress(self, rid: str, num_tokens: int) -> dict[str, Any]:
        """Return the statistics of all its rounds so far, for a report on the running server."""
        counters = Counters._make(self.counters)
        rounds = counters.rounds_ct
        weighs = self.config_now.weighs
        return {
            "rid": rid,
            "output_tokens": num_tokens,
            "mode": self.config_now.mode,
            "num_particles": self.config_now.num_particles,
            "num_steps": self.config_now.num_steps,
            "rounds": int(rounds),
            "tokens_per_pass": num_tokens / rounds if rounds else None,
            "ess_ratio": counters.ess_sum / counters.particles_sum if rounds and weighs else None,
            "resample_rate": counters.resample_ct / rounds if rounds else None,
        }

    def trace(self, prompt_length: int, output_ids: Sequence[int]) -> dict[str, Any]:
        """Return its `Trace` as JSON-compatible values."""
        trace = Trace(
            mode=self.config.mode,
            num_particles=self.config.num_particles,
            num_steps=self.config.num_steps,
            prompt_length=prompt_length,
            rounds=self.rounds,
            emitted_after=self._untraced(output_ids),
        )
        return {"version": trace.version, **msgspec.to_builtins(trace)}

    def meta_info(
        self, output_ids: list[int], finish_reason: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the `meta_info` fields of the finished request, without its trace."""
        counters = Counters._make(self.counters)
        log_evidence = counters.log_evidence + self.first_log_sum
        totals: list[Any] = [*counters._replace(log_evidence=log_evidence)]
        fields = meta_info(totals, self.config, self.num_replayed)
        if self.has_lost_tails:
            fields[META_PREFIX + "log_evidence"] = None
        if self.config.return_particles:
            fields[META_PREFIX + "particles"] = self.particles or self._equal(
                output_ids, finish_reason
            )
        return fields

    def _equal(
        self, output_ids: list[int], finish_reason: Mapping[str, Any] | None
    ) -> list[dict[str, Any]] | None:
        """Return the particles of a sequence that ended with a shared first token, else None."""
        if len(output_ids) != self.num_prefilled + 1 or self.open_token.is_open:
            return None  # aborted
        count = self.config.num_particles
        weights = {"weight": 1.0 / count, "log_weight": 0.0}
        return [as_particle(list(output_ids), finish_reason, **weights) for _ in range(count)]


def as_particle(
    output_ids: list[int],
    finish_reason: Mapping[str, Any] | None,
    *,
    weight: float,
    log_weight: float | None,
) -> dict[str, Any]:
    """Return a particle in the form of `meta_info`; log-weight None for weight 0."""
    return {
        "output_ids": output_ids,
        "weight": weight,
        "log_weight": log_weight,
        "finish_reason": finish_reason,
    }


class RequestStates:
    """States of all requests, and seeds for those without one.

    Args:
        random_seed: the server's; seeds of requests without one are derived from it.
        dial: converts the requests' tilts into evidence thresholds.
        runners: of the server's potentials, by the potentials' names.
        replica: number of this data-parallel replica: all number their requests from 1, and must
            not draw the same numbers.
    """

    def __init__(
        self,
        config: SMCConfig,
        random_seed: int,
        dial: Dial | None = None,
        runners: Mapping[str, PotentialRunner] = MappingProxyType({}),
        replica: int | None = None,
    ) -> None:
        self._config = config
        self._callers = runners
        self._dial = dial or Dial()
        self._random_seed = derive_seed(random_seed, replica) if replica else random_seed
        self._num_seeded = 0

    def begin(self, reqs: list[Req], budget: Budget | None = None) -> list[Start]:
        """Start or restart requests as they are prefilled, in batch order, on ``budget``."""
        return [self._begin(req, budget) for req in reqs]

    def sizes_on(self, req: Req, budget: Budget | None) -> Budget:
        """Return the N and K of a request on ``budget``, before it begins."""
        found = apply_budget(config_of(self._config, req), budget)
        return Budget(found.num_particles, found.num_steps)

    def _begin(self, req: Req, budget: Budget | None) -> Start:
        state = find_state(req)
        if state is None:
            config = self._dial.with_threshold(config_of(self._config, req))
            state = RequestState.of(self._seed(req), config)
            self._resolve_potentials(req, state)
            req.smc_state = state  # pyright: ignore[reportAttributeAccessIssue] -- ours
        state.begin(budget, req.output_ids)
        # Only if the target is p do the dropped tokens have an evidence factor of mean 1.
        state.has_lost_tails |= not state.config.is_normalized and req.retraction_count > 0
        is_last = remaining(req) <= 1
        shared = state.config.is_normalized or (is_last and not state.potentials)
        state.open_token.begin(None if shared else len(req.output_ids))
        # A retracted request's particles are gone: later tokens are drawn with new numbers.
        seed = derive_seed(state.seed, req.retraction_count)
        return _start(req, seed, state)

    def _resolve_potentials(self, req: Req, state: RequestState) -> None:
        """Resolve the potentials that a request names, which were validated on arrival.

        If a potential's `Args` accept the arguments there, but raise here, the request ends.
        """
        # A request for no tokens, as SGLang sends before n samples, has no text to score.
        specs = state.config.potentials if req.sampling_params.max_new_tokens else ()
        known = {name: runner.potential for name, runner in self._callers.items()}
        try:
            state.potentials = tuple(spec.resolve(known) for spec in specs)
        except ValueError as error:
            end_request(req, f"The request has {error}", HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        state.runners = tuple(self._callers[spec.name] for spec in specs)

    def note_first(self, reqs: list[Req], log_sums: torch.Tensor) -> None:
        """Store the log-weights of first tokens ``[G]``, which are 0 if p is the target.

        An answer may end with that token, before the device has counted it. Minus infinity, where
        no token could be drawn, is skipped.
        """
        states = [state_of(req) for req in reqs]
        if all(state.config.is_normalized for state in states):
            return
        for state, log_sum in zip(states, log_sums.tolist(), strict=True):
            if log_sum != -math.inf:
                state.first_log_sum = log_sum

    def _seed(self, req: Req) -> int:
        if req.sampling_params.sampling_seed is not None:
            return req.sampling_params.sampling_seed
        self._num_seeded += 1
        return derive_seed(self._random_seed, self._num_seeded)


def find_state(req: Req) -> RequestState | None:
    """Return the state of a request; None for one that SMC has not started."""
    return req.__dict__.get("smc_state")


def state_of(req: Req) -> RequestState:
    """Return the state of a request that decodes."""
    return req.smc_state  # pyright: ignore[reportAttributeAccessIssue] -- ours


def arena_end(config: SMCConfig, req: Req, num_passes: int = 1) -> int:
    """Return where the arena of a running request with these options ends in its row, at least.

    Args:
        num_passes: of the target in a round without drafts: each after the first takes a slot more.
    """
    end = kv_of(req).kv_committed_len + arena(config, remaining(req)) + num_passes - 1
    return end - end % config.page_size


def num_new(config: SMCConfig, req: Req) -> int:
    """Return the slots that a running request with these options takes for its next round."""
    owned = -(-allocated(req) // config.page_size) * config.page_size
    return max(0, arena_end(config, req) - owned)


def _start(req: Req, seed: int, state: RequestState) -> Start:
    params = req.sampling_params
    row = kv_of(req).req_pool_idx
    assert row is not None, "SGLang gives a request its row before its prefill"
    assert req.vocab_size is not None, "set as it comes in"
    stops = stop_tokens(params.stop_token_ids, req.eos_token_ids, req.tokenizer, req.vocab_size)
    return Start(row, seed, params, state.config, stops, len(req.output_ids), state.counters)
