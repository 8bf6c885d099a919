"""The requests of one round, and what the host knows of them."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_smc.memory import arena
from sglang_smc.options.budget import Budget, apply_budget, union
from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import RESAMPLING_METHODS, SMCConfig
from sglang_smc.requests.rules import TextRules, has_judges, has_rules
from sglang_smc.requests.state import RequestState, state_of
from sglang_smc.state.edits import has_edits
from sglang_smc.state.settings import Settings, filter_kinds
from sglang_smc.state.tail_logprobs import NO_LOGPROBS, LogprobWidths
from sglang_smc.state.transfer import on_device
from sglang_smc.tokens.distribution import FilterKinds, SamplingRules
from sglang_smc.tokens.edits import Edits

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_smc.drafts.ngram import Matches


class RoundShape(NamedTuple):
    """Sizes and kinds in a batch, known without asking the device; tensors are cut to them."""

    budget: Budget | None  # that bounds N and K in this round
    num_held: int  # the most particles that a request has or, as the round begins, had
    resizes: bool  # some request has more or fewer than it had
    num_particles: int  # the most that a request has
    num_steps: int  # the most that a request drafts a round
    max_tail: int  # no tail is longer when the round ends
    max_arena: int  # no request owns more KV slots behind its emitted text
    kinds: FilterKinds
    edits: bool  # some request has penalties, biases or a least number of tokens
    powered: bool  # some request samples from a power of p
    weighs: bool  # some request's rounds weigh and resample
    verifies: bool  # some request's rounds verify
    shows_particles: bool  # some request wants all of its particles with the answer
    traces: bool  # some request wants to know what its particles did
    has_open_token: bool  # particles of some request may differ in its first token
    has_rules: bool  # the host looks at some request's text
    judges: bool  # some request's texts are judged on the host: by potentials, for a vote
    has_matches: bool  # some request's drafts are mixed with n-gram matches
    logprobs: LogprobWidths  # of the log-probabilities that requests want
    methods: tuple[str, ...]  # how ancestors are drawn, by one request or another

    @property
    def num_rows(self) -> int:
        """Tokens of one request that the target reads, at most."""
        return self.num_particles * (self.num_steps + 1)

    def lacks(self, other: "RoundShape") -> list[str]:
        """What a round of another shape does that one of this does not, in words."""
        pairs = zip(self._parts().items(), other._parts().values(), strict=True)
        return [name for (name, mine), theirs in pairs if not mine >= theirs]

    def _parts(self) -> dict[str, Any]:
        """Sizes, kinds and sets: a shape that has no less of any does all that another does."""
        return {
            "more particles": self.num_particles,
            "more drafted tokens": self.num_steps,
            "longer tails": self.max_tail,
            "larger arenas": self.max_arena,
            "top-k, top-p or min-p": self.kinds.filtered,
            "temperature 0": self.kinds.greedy,
            "penalties, biases or min_new_tokens": self.edits,
            "a power of p": self.powered,
            "mode smc": self.weighs,
            "a mode that verifies": self.verifies,
            "return_particles": self.shows_particles,
            "trace": self.traces,
            "particles that differ in the first token": self.has_open_token,
            "structured output, stop texts or a custom logit processor": self.has_rules,
            "potentials or a vote": self.judges,
            "n-gram matches": self.has_matches,
            "log-probabilities": self.logprobs.own,
            f"more than {self.logprobs.top} top_logprobs": self.logprobs.top,
            f"more than {self.logprobs.listed} token_ids_logprob": self.logprobs.listed,
            "another resampling method": frozenset(self.methods),
        }


class RoundInputs(NamedTuple):
    """What a round is told of its requests, int64; the rest stands in tables."""

    rows: torch.Tensor  # [G] in req_to_token_pool
    committed: torch.Tensor  # [G] KV slots of the emitted text
    known: torch.Tensor  # [4, G] by the host: KV slots owned, and `SMCConfig.round_sizes`

    @classmethod
    def of(cls, batch: "ScheduleBatch", device: str) -> "RoundInputs":
        """The inputs of a batch that SGLang has prepared; one copy to the device."""
        states = [state_of(req) for req in batch.reqs]
        known = [(state.arena[1], *state.now.round_sizes) for state in states]
        columns = list(zip(*known, strict=True))
        return cls(batch.req_pool_indices, batch.seq_lens.long(), on_device(device, columns))

    def split(self, most: int) -> "list[RoundInputs]":
        """Return the inputs of slices of at most so many groups."""
        columns = (column.split(most, dim=-1) for column in self)
        return [RoundInputs(*part) for part in zip(*columns, strict=True)]

    @classmethod
    def of_padding(
        cls, config: SMCConfig, budget: Budget | None, size: int, device: str
    ) -> "RoundInputs":
        """The inputs of ``size`` groups on SGLang's padding row, whose particles have all ended.

        Its text ends where its first slot, 0, is there to be read.
        """
        rows = torch.zeros(size, dtype=torch.int64, device=device)
        known = [1, *map(int, apply_budget(config, budget).round_sizes)]
        columns = on_device(device, known).unsqueeze(1).repeat(1, size)
        return cls(rows, rows + 1, columns)


class RoundBatch(NamedTuple):
    """The requests of one round: who they are, what they asked for, what they own."""

    reqs: "list[Req]"
    shape: RoundShape
    rows: torch.Tensor  # [G] int64 in req_to_token_pool
    committed: torch.Tensor  # [G] int64 KV slots of the emitted text
    allocated: torch.Tensor  # [G] int64 KV slots owned
    starts: torch.Tensor  # [G, N] int64 output tokens of each particle as the round begins
    column: torch.Tensor  # [K] int64: 0, 1, ..., which drafted token of a particle
    furthest: torch.Tensor  # [G, N] int64 the most of any: where a group decides for all
    last_two: torch.Tensor  # [G, N, 2] int64 the token that each continues from, and one before
    may_stratify: torch.Tensor  # [G, N] bool: weighed; verified chains are independent
    settings: Settings
    p_rules: SamplingRules  # of the target's rows
    q_rules: SamplingRules  # of the draft's
    rules: TextRules
    edits: Edits | None = None  # where some request has one
    matches: "Matches | None" = None  # where some request wants them


def shape_of_server(config: SMCConfig, budget: Budget | None = None) -> RoundShape:
    """The largest shape of batches whose requests choose nothing but sizes for themselves.

    On a ``budget`` tails and arenas may be there that larger ones have left.
    """
    now = apply_budget(config, budget)
    return RoundShape(
        budget=budget,
        num_held=now.num_particles,
        resizes=False,
        num_particles=now.num_particles,
        num_steps=now.num_steps,
        max_tail=arena.tail(config, config.lag),
        max_arena=arena.arena(config, config.lag),
        kinds=FilterKinds(filtered=False, greedy=True),
        edits=False,
        powered=config.power != 1.0,
        # Without drafts the two are one.
        weighs=now.weighs or now.num_steps == 0,
        verifies=not now.weighs or now.num_steps == 0,
        shows_particles=False,
        traces=False,
        has_open_token=config.power != 1.0,
        has_rules=False,
        judges=False,
        has_matches=False,
        logprobs=NO_LOGPROBS,
        methods=(config.resampling_method,) if now.weighs or now.num_steps == 0 else (),
    )


def shape_of_any(config: SMCConfig, budget: Budget | None, logprobs: LogprobWidths) -> RoundShape:
    """The shape of batches whose requests choose whatever a device can decide."""
    return shape_of_server(config, budget)._replace(
        max_tail=arena.max_tail(config),
        max_arena=arena.max_arena(config),
        kinds=FilterKinds(filtered=True, greedy=True),
        edits=True,
        powered=True,
        weighs=True,
        verifies=True,
        shows_particles=True,
        has_open_token=True,
        logprobs=logprobs,
        methods=RESAMPLING_METHODS,
    )


def shape_of(reqs: "list[Req]") -> RoundShape:
    """The shape of a batch.

    Under the overlap schedule the host's numbers are one round old, and too large if anything.
    """
    states = [state_of(req) for req in reqs]
    configs = [state.now for state in states]
    sizes = [(state.last.num_particles, state.now.num_particles) for state in states]
    return RoundShape(
        budget=states[0].budget,
        num_held=max(map(max, sizes)),
        resizes=any(before != after for before, after in sizes),
        num_particles=max(config.num_particles for config in configs),
        num_steps=max(config.num_steps for config in configs),
        max_tail=max(_longest_tail(req, state) for req, state in zip(reqs, states, strict=True)),
        max_arena=max(end - start for start, end in (state.arena for state in states)),
        kinds=filter_kinds(reqs),
        edits=any(map(has_edits, reqs)),
        powered=any(config.power != 1.0 for config in configs),
        weighs=any(config.weighs for config in configs),
        verifies=not all(config.weighs for config in configs),
        shows_particles=any(config.return_particles for config in configs),
        traces=any(config.trace for config in configs),
        has_open_token=not all(config.is_normalized for config in configs),
        has_rules=any(has_rules(req) for req in reqs),
        judges=any(has_judges(req) for req in reqs),
        has_matches=any(config.uses_matches for config in configs),
        logprobs=LogprobWidths.of(reqs),
        methods=_methods(configs),
    )


def _longest_tail(req: "Req", state: RequestState) -> int:
    return arena.tail(union(state.last, state.now), arena.remaining(req))


def _methods(configs: list[RequestConfig]) -> tuple[str, ...]:
    draws = (config for config in configs if config.weighs or config.num_steps == 0)
    return tuple(sorted({config.resampling_method for config in draws}))
