"""The host's notes on each request: its seed, and what it has counted so far.

Everything else about a request lives on the device. The notes hang on SGLang's
request object, as `smc_state`, and go when it goes; they outlive a retraction.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from sglang_smc.options.budget import Budget, apply_budget, union
from sglang_smc.options.request import RequestConfig, config_of, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.requests.logprob_books import take_back
from sglang_smc.smc.randomness import derive_seed
from sglang_smc.state.counters import META_PREFIX, Counters, meta_info, zero_counters
from sglang_smc.state.settings import RequestSpec, stop_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestState(msgspec.Struct):
    """What is known of one request on the host."""

    seed: int
    config: RequestConfig
    counters: list[float]
    # The bounds of N and K, where the server adapts them: of the last round, and of the next.
    budgets: tuple[Budget | None, Budget | None] = (None, None)
    arena: tuple[int, int] = (0, 0)  # from the end of the text that the host knew, when reserved
    open_token_at: int | None = (
        None  # the output token that prefill drew, while particles differ in it
    )
    was_settled: bool = False  # in the round that is being taken
    is_held: bool = False  # its stream, until the token is settled
    has_lost_tails: bool = False  # a retraction dropped tokens that the evidence has counted
    is_stuck: bool = False  # its grammar let no token follow what prefill read
    terminated_by: int | None = None  # the token that prefill drew, where it ends a grammar's text
    first_log_sum: float = 0.0  # what the weights gained at the first token; in no counter yet
    particles: list[dict[str, Any]] | None = None  # all of them, as they stood at the end
    # Where it penalizes: [V] float32, how often its emitted text but for the last token has each.
    counts: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # where it biases tokens: [V] float32
    processor: Any = None  # its custom logit processor, loaded

    @property
    def budget(self) -> Budget:
        """N and K of its last round, or of the one that is prepared."""
        config = apply_budget(self.config, self.budgets[1])
        return Budget(config.num_particles, config.num_steps)

    def span(self, budget: Budget | None) -> RequestConfig:
        """What memory must hold as the next round begins on ``budget``, and as it ends."""
        return union(apply_budget(self.config, self.budgets[1]), apply_budget(self.config, budget))

    def step_to(self, budget: Budget | None) -> None:
        """Let the next round run on ``budget``."""
        self.budgets = self.budgets[1], budget

    def take(self, totals: list[float]) -> None:
        """Note what the device has counted by the end of a round."""
        self.counters, self.first_log_sum = totals, 0.0

    def count_nan(self) -> None:
        """Note that prefill found logits that mean nothing; the device counts rounds alone."""
        place = Counters._fields.index("nan_ct")
        self.counters = [count + (i == place) for i, count in enumerate(self.counters)]

    def meta_info(self, output_ids: list[int]) -> dict[str, Any]:
        """The `meta_info` fields of the finished request."""
        log_evidence = self.counters[-1] + self.first_log_sum
        fields = meta_info([*self.counters[:-1], log_evidence], self.config)
        if self.has_lost_tails:
            fields[META_PREFIX + "log_evidence"] = None
        if self.config.return_particles:
            fields[META_PREFIX + "particles"] = self.particles or self._equal(output_ids)
        return fields

    def _equal(self, output_ids: list[int]) -> list[dict[str, Any]] | None:
        """The particles of a text that ended with the token they all began with."""
        if len(output_ids) != 1 or self.open_token_at is not None:
            return None  # aborted on the way
        num_particles = self.config.num_particles
        weight = 1.0 / num_particles
        return [as_particle(list(output_ids), weight, 0.0) for _ in range(num_particles)]

    def settle(self, req: "Req", token: int) -> None:
        """All particles have come to agree on the token that prefill drew for each of them."""
        assert self.open_token_at is not None
        req.output_ids[self.open_token_at] = token
        if req.grammar is not None:  # it has read the stand-in
            req.grammar.rollback(1)
            req.grammar.accept_token(token)
        self.open_token_at, self.was_settled = None, True
        self.release(req)

    def withdraw(self, req: "Req") -> None:
        """Take back a token that is not settled, so that the next prefill does not read it."""
        if self.open_token_at is None:
            return
        num_open = len(req.output_ids) - self.open_token_at
        if num_open and req.grammar is not None:
            req.grammar.rollback(num_open)
        del req.output_ids[self.open_token_at :]
        take_back(req, self.open_token_at)
        self.release(req)

    def hold(self, req: "Req") -> None:
        """Stream nothing of a request whose newest token may still change."""
        self.is_held, req.stream = self.is_held or req.stream, False

    def release(self, req: "Req") -> None:
        """Let the stream go on."""
        req.stream, self.is_held = req.stream or self.is_held, False


def as_particle(output_ids: list[int], weight: float, log_weight: float) -> dict[str, Any]:
    """How `meta_info` shows a particle."""
    return {"output_ids": output_ids, "weight": weight, "log_weight": log_weight}


class Start(NamedTuple):
    """What the device needs to begin a request, or to begin it again."""

    spec: RequestSpec
    num_emitted: int
    counters: list[float]


class RequestStates:
    """Begins requests and numbers those that bring no seed of their own.

    Args:
        config: the server's.
        random_seed: the server's; seeds of requests that bring none follow from it.
    """

    def __init__(self, config: SMCConfig, random_seed: int) -> None:
        self._config = config
        self._random_seed = random_seed
        self._num_seeded = 0

    def begin(self, reqs: "list[Req]", budget: Budget | None = None) -> list[Start]:
        """Open or reopen requests as they are prefilled, in batch order, on ``budget``."""
        return [self._begin(req, budget) for req in reqs]

    def _begin(self, req: "Req", budget: Budget | None) -> Start:
        run = find_state(req)
        if run is None:
            config = config_of(self._config, req)
            run = RequestState(self._seed(req), config, zero_counters(config.num_particles))
            req.smc_state = run  # type: ignore[attr-defined]
        run.budgets = budget, budget
        # For p itself what is dropped has a factor of mean 1; for other targets it has not.
        run.has_lost_tails |= not run.config.is_normalized and req.retraction_count > 0
        # A power of p, or p within a grammar, knows its next-token law only given all that may
        # follow, so that a token drawn for all could not be corrected: each draws its own.
        is_last = len(req.output_ids) + 1 >= req.sampling_params.max_new_tokens
        run.open_token_at = None if run.config.is_normalized or is_last else len(req.output_ids)
        # A retracted request's particles are gone: what follows its text is drawn anew.
        seed = derive_seed(run.seed, req.retraction_count)
        return Start(_spec(req, seed, run.config), len(req.output_ids), run.counters)

    def padding(self) -> RequestSpec:
        """What SGLang's padding row asks for: nothing, by the server's settings."""
        return RequestSpec(
            row=0,
            seed=0,
            temperature=1.0,
            top_k=1 << 30,
            top_p=1.0,
            min_p=0.0,
            max_new_tokens=1,
            min_new_tokens=0,
            ignore_eos=False,
            stop_tokens=frozenset(),
            config=request_config(self._config, None),
        )

    def note_first(self, reqs: "list[Req]", log_sums: torch.Tensor) -> None:
        """Note what first tokens ``[G]`` weigh: nothing, if p itself is the target.

        An answer may end with that token, before the device has counted anything; not so where
        nothing could be drawn, whose log is infinite.
        """
        runs = [find_state(req) for req in reqs]
        if any(run is not None and not run.config.is_normalized for run in runs):
            for run, log_sum in zip(runs, log_sums.tolist(), strict=True):
                if run is not None and not run.is_stuck:
                    run.first_log_sum = log_sum

    def _seed(self, req: "Req") -> int:
        if req.sampling_params.sampling_seed is not None:
            return req.sampling_params.sampling_seed
        self._num_seeded += 1
        return derive_seed(self._random_seed, self._num_seeded)


def find_state(req: "Req") -> RequestState | None:
    """The notes on a request; None for one that SMC has not begun, or never will."""
    return req.__dict__.get("smc_state")


def state_of(req: "Req") -> RequestState:
    """The notes on a request that decodes."""
    return req.smc_state  # type: ignore[attr-defined]


def has_open_token(req: "Req") -> bool:
    """Whether the newest output token stands in for one that the particles differ in."""
    run = find_state(req)
    return run is not None and run.open_token_at is not None


def settled_ids(req: "Req") -> list[int]:
    """The output tokens that all particles share."""
    run = find_state(req)
    return list(req.output_ids[: run.open_token_at if run is not None else None])


def publish(req: "Req") -> None:
    """Give a finished request's totals to SGLang's streamer, which takes them to `meta_info`."""
    run = find_state(req)
    if run is not None and req.finished():
        fields = run.meta_info(list(req.output_ids))
        req.customized_info = {name: _Whole([value]) for name, value in fields.items()}


class _Whole(list):
    """A list of one that every slice leaves whole.

    The streamer slices such lists by output token, one element each, but a total belongs
    to the whole text.
    """

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)


def _spec(req: "Req", seed: int, config: RequestConfig) -> RequestSpec:
    params = req.sampling_params
    return RequestSpec(
        row=req.req_pool_idx,
        seed=seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        ignore_eos=params.ignore_eos,
        stop_tokens=stop_tokens(
            params.stop_token_ids, req.eos_token_ids, req.tokenizer, req.vocab_size
        ),
        config=config,
    )
