"""The requests of one round, and what the host knows of them."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_smc.memory import arena
from sglang_smc.options.budget import Budget, apply_budget, union
from sglang_smc.options.request import config_of
from sglang_smc.options.server import SMCConfig
from sglang_smc.requests.grammar import Masks, has_grammar
from sglang_smc.requests.logit_edits import Edit, is_edited
from sglang_smc.requests.state import state_of
from sglang_smc.requests.stopping import has_stop_text
from sglang_smc.state.logprobs import NO_LOGPROBS, LogprobWidths
from sglang_smc.state.settings import FilterKinds, Settings

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


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
    powered: bool  # some request samples from a power of p
    weighs: bool  # some request's rounds weigh and resample
    verifies: bool  # some request's rounds verify
    shows_particles: bool  # some request wants all of its particles with the answer
    stops: bool  # some request stops at a string or pattern
    edited: bool  # some request changes logits
    constrained: bool  # some request has a grammar
    logprobs: LogprobWidths  # of the log-probabilities that requests want
    methods: tuple[str, ...]  # how ancestors are drawn, by one request or another

    def covers(self, other: "RoundShape") -> bool:
        """Whether a round of this extent does all that one of another does."""
        sizes = zip(self._sizes(), other._sizes(), strict=True)
        kinds = zip(self._kinds(), other._kinds(), strict=True)
        return (
            all(mine >= theirs for mine, theirs in sizes)
            and all(mine or not theirs for mine, theirs in kinds)
            and set(self.methods) >= set(other.methods)
        )

    def _sizes(self) -> tuple[int, ...]:
        of_round = self.num_particles, self.num_steps, self.max_tail, self.max_arena
        return (*of_round, *self.logprobs)

    def _kinds(self) -> tuple[bool, ...]:
        of_round = self.powered, self.weighs, self.verifies, self.shows_particles, self.stops
        return (*self.kinds, *of_round, self.edited, self.constrained)

    @property
    def opens(self) -> bool:
        """Whether particles of some request may differ in its first token."""
        return self.powered or self.constrained


class RoundInputs(NamedTuple):
    """What a round is told of its requests, each ``[G]`` int64; the rest stands in tables."""

    rows: torch.Tensor  # in req_to_token_pool
    committed: torch.Tensor  # KV slots of the emitted text
    allocated: torch.Tensor  # KV slots owned


class RoundBatch(NamedTuple):
    """The requests of one round: who they are, what they asked for, what they own."""

    reqs: "list[Req]"
    inputs: RoundInputs
    settings: Settings
    shape: RoundShape
    edits: tuple[Edit, ...] = ()  # of all logits in the round
    masks: Masks | None = None  # of the tokens that grammars allow

    @property
    def rows(self) -> torch.Tensor:
        """``[G]`` in req_to_token_pool."""
        return self.inputs.rows

    @property
    def committed(self) -> torch.Tensor:
        """``[G]`` KV slots of the emitted text."""
        return self.inputs.committed

    @property
    def allocated(self) -> torch.Tensor:
        """``[G]`` KV slots owned."""
        return self.inputs.allocated


def shape_of_server(config: SMCConfig, budget: Budget | None = None) -> RoundShape:
    """The largest extent of batches whose requests choose nothing but sizes for themselves.

    On a ``budget`` tails and arenas may be there that larger ones have left.
    """
    now = apply_budget(config, budget)
    weighs = now.mode == "smc"
    return RoundShape(
        budget=budget,
        num_held=now.num_particles,
        resizes=False,
        num_particles=now.num_particles,
        num_steps=now.num_steps,
        max_tail=arena.max_tail(config),
        max_arena=arena.max_arena(config),
        kinds=FilterKinds(filtered=False, greedy=True, early=False),
        powered=config.power != 1.0,
        # Without drafts the two are one.
        weighs=weighs or now.num_steps == 0,
        verifies=not weighs or now.num_steps == 0,
        shows_particles=False,
        stops=False,
        edited=False,
        constrained=False,
        logprobs=NO_LOGPROBS,
        methods=(config.resampling_method,) if weighs or now.num_steps == 0 else (),
    )


def shape_of(server: SMCConfig, reqs: "list[Req]") -> RoundShape:
    """The extent of a batch.

    Under the overlap schedule the host's figures are one round old, and too large if anything.
    """
    asked, budgets = (
        [config_of(server, req) for req in reqs],
        [state_of(req).budgets for req in reqs],
    )
    befores, configs = (
        [apply_budget(*pair) for pair in zip(asked, of_round, strict=True)]
        for of_round in zip(*budgets, strict=True)
    )
    spans = list(zip(map(union, befores, configs), reqs, strict=True))
    num_before, num_after = ([c.num_particles for c in each] for each in (befores, configs))
    arenas = [state_of(req).arena for req in reqs]
    return RoundShape(
        budget=budgets[0][1],
        num_held=max(num_before + num_after),
        resizes=num_before != num_after,
        num_particles=max(num_after),
        num_steps=max(config.num_steps for config in configs),
        max_tail=max(arena.tail(config, arena.remaining(req)) for config, req in spans),
        max_arena=max(end - start for start, end in arenas),
        kinds=FilterKinds.of(reqs),
        powered=any(config.power != 1.0 for config in configs),
        weighs=any(config.weighs for config in configs),
        verifies=not all(config.weighs for config in configs),
        shows_particles=any(config.return_particles for config in configs),
        stops=any(has_stop_text(req) for req in reqs),
        edited=any(is_edited(req) for req in reqs),
        constrained=any(has_grammar(req) for req in reqs),
        logprobs=LogprobWidths.of(reqs),
        methods=tuple(
            sorted({c.resampling_method for c in configs if c.weighs or c.num_steps == 0})
        ),
    )
