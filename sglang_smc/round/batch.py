"""Define the inputs of a round, its shape on the host, and the tensors between its steps."""

import math
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.kv import arena
from sglang_smc.kv.ledger import Ledger
from sglang_smc.kv.sizes import tensor_bytes
from sglang_smc.kv.transfer import on_device
from sglang_smc.options.request import (
    Budget,
    RequestConfig,
    apply_budget,
    request_config,
    union,
)
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.ngram import Matches
from sglang_smc.rules.registry import TextRules, has_rules, has_scorers
from sglang_smc.smc.deciding import Decider, Plain, VerifyEach, VerifyTogether, Weigh
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.ops import Ops
from sglang_smc.state.edits import EditTable, has_edits
from sglang_smc.state.logprobs import NO_LOGPROBS, LogprobWidths
from sglang_smc.state.metrics import CounterTable, zero_counters
from sglang_smc.state.particles import ParticleTable
from sglang_smc.state.request import state_of
from sglang_smc.state.settings import RequestTable, Settings, Start, is_greedy, uses_filters


class Need(str, Enum):
    """What some request of a batch needs of a round beside sizes and deciders, in words."""

    FILTERS = "top-k, top-p or min-p"  # and is not greedy
    GREEDY = "temperature 0"
    EDITS = "penalties, biases or min_new_tokens"
    POWER = "a power of p"
    PARTICLES = "return_particles"
    TRACE = "trace"
    OPEN_TOKEN = "particles that differ in the first token"
    RULES = "structured output, stop texts or a custom logit processor"  # read on the host
    POTENTIALS = "potentials"  # on the host
    MATCHES = "n-gram matches"  # with which drafts are mixed


class RoundShape(NamedTuple):
    """Sizes and kinds in a batch, from the host's state; tensors are cut to them."""

    budget: Budget | None  # that bounds N and K in this round
    num_particles: int  # N: the most of a request
    num_steps: int  # K: the most tokens that a request drafts per round
    max_tail: int  # the longest tail in the round, before it is narrowed
    max_arena: int  # the most KV slots of a request beyond `RoundInputs.committed`
    deciders: frozenset[Decider]  # of its requests, whether they draft or not
    needs: frozenset[Need]
    logprobs: LogprobWidths = NO_LOGPROBS  # of the log-probabilities that requests return

    def having(self, *needs: Need) -> "RoundShape":
        """Return the shape with more needs."""
        return self._replace(needs=self.needs.union(needs))

    @property
    def walks(self) -> bool:
        """Return whether some request's rounds verify sampled chains as one multi-draft."""
        return any(isinstance(one, VerifyTogether) and one.chains for one in self.deciders)

    @property
    def branches(self) -> bool:
        """Return whether some request's rounds verify a tree, at temperature 0."""
        return any(isinstance(one, VerifyTogether) and one.trees for one in self.deciders)

    @property
    def extends(self) -> tuple[int, ...]:
        """Return M of each request whose rounds verify each particle's own chains."""
        return tuple(sorted(one.num_chains for one in self.deciders if isinstance(one, VerifyEach)))

    @property
    def many_chains(self) -> bool:
        """Return whether some particle has more chains than one."""
        return any(chains > 1 for chains in self.extends)

    @property
    def has_rules(self) -> bool:
        """Return whether some request has rules that read its sequences on the host."""
        return Need.RULES in self.needs

    @property
    def skips_draft(self) -> bool:
        """Return whether a draft that `lags` reads the tokens of this round later."""
        return self.num_steps == 0 and self.num_particles == 1

    def lacks(self, other: "RoundShape") -> list[str]:
        """Return, in words, the options that another shape supports and this shape lacks."""
        pairs = zip(self._sizes().items(), other._sizes().values(), strict=True)
        fewer = [name for (name, size), needed in pairs if size < needed]
        return fewer + sorted(other._kinds() - self._kinds())

    def _sizes(self) -> dict[str, int]:
        """Return sizes: a shape with no smaller one supports those of another."""
        return {
            "more particles": self.num_particles,
            "more drafted tokens": self.num_steps,
            "longer tails": self.max_tail,
            "larger arenas": self.max_arena,
            "log-probabilities": self.logprobs.own,
            f"more than {self.logprobs.top} top_logprobs": self.logprobs.top,
            f"more than {self.logprobs.listed} token_ids_logprob": self.logprobs.listed,
        }

    def _kinds(self) -> set[str]:
        return {need.value for need in self.needs}.union(*(one.kinds for one in self.deciders))


class RoundInputs(NamedTuple):
    """Inputs of a round, int64; everything else is in tables."""

    rows: torch.Tensor  # [G] in req_to_token_pool
    committed: torch.Tensor  # [G] tokens with KV: prompt and emitted output, but its last token
    known: torch.Tensor  # [4, G] from the host: where arenas end, and `SMCConfig.round_sizes`

    @classmethod
    def of(cls, batch: ScheduleBatch, device: str) -> "RoundInputs":
        """Return the inputs of a batch that SGLang has prepared, by one copy to the device."""
        states = [state_of(req) for req in batch.reqs]
        known = [(state.arena[1], *state.now.round_sizes) for state in states]
        columns = list(zip(*known, strict=True))
        return cls(batch.req_pool_indices, batch.seq_lens.long(), on_device(device, columns))

    def split(self, most: int) -> "list[RoundInputs]":
        """Return the inputs of slices of at most ``most`` groups."""
        columns = (column.split(most, dim=-1) for column in self)
        return [RoundInputs(*part) for part in zip(*columns, strict=True)]

    @classmethod
    def of_padding(
        cls, config: SMCConfig, budget: Budget | None, size: int, device: str
    ) -> "RoundInputs":
        """Return the inputs of ``size`` groups on SGLang's padding row, with ended particles.

        Its sequence has one token, in slot 0, so that there is KV to read.
        """
        rows = torch.zeros(size, dtype=torch.int64, device=device)
        known = [1, *map(int, apply_budget(config, budget).round_sizes)]
        columns = on_device(device, known).unsqueeze(1).repeat(1, size)
        return cls(rows, rows + 1, columns)


class RoundBatch(NamedTuple):
    """Requests of one round, with their options and KV slots."""

    reqs: list[Req]
    shape: RoundShape
    rows: torch.Tensor  # [G] int64 in req_to_token_pool
    committed: torch.Tensor  # [G] int64, of `RoundInputs`
    allocated: torch.Tensor  # [G] int64 where the arena ends in the request's row
    output_lengths: torch.Tensor  # [G, N] int64, of each particle at the start of the round
    column: torch.Tensor  # [K] int64: 0, 1, ..., K - 1
    position: torch.Tensor  # [G, N] int64: keys the uniforms of decisions; new in each round
    last_two: torch.Tensor  # [G, N, 2] int64 the last two tokens of each particle, in order
    may_stratify: torch.Tensor  # [G, N] bool: may share uniforms; chains of one multi-draft may not
    settings: Settings
    rules: TextRules
    ops: Ops
    edits: Edits | None = None  # where some request has one
    matches: Matches | None = None  # where some request uses them

    @property
    def deciders(self) -> list[Decider]:
        """Return the deciders of the round; the first is for the groups of no other."""
        if self.shape.num_steps == 0:  # the target draws the next token, in every mode
            return [Plain()]
        order = VerifyTogether, VerifyEach, Weigh
        return sorted(self.shape.deciders, key=lambda one: (order.index(type(one)), str(one)))

    def groups_of(self, decider: Decider) -> torch.Tensor:
        """Return the groups that choose a decider, ``[G]`` bool."""
        settings, extends = self.settings, self.shape.extends
        if isinstance(decider, VerifyEach):
            is_only = len(extends) == 1
            mine = settings.extends
            return mine if is_only else mine & (settings.chains == decider.num_chains)
        return settings.weighs & ~settings.extends if extends else settings.weighs


def shape_of_server(config: SMCConfig, budget: Budget | None = None) -> RoundShape:
    """Return the largest shape of batches of requests that set only sizes.

    On a ``budget`` the tails and arenas of earlier, larger budgets may still exist.
    """
    now = apply_budget(config, budget)
    drafts = now.num_steps > 0  # without draft tokens weighing and verifying are the same
    of_config: Decider = VerifyTogether()
    if now.weighs:
        of_config = VerifyEach(now.num_chains) if now.extends else Weigh()
    powered = (Need.POWER, Need.OPEN_TOKEN) if config.power != 1.0 else ()
    return RoundShape(
        budget=budget,
        num_particles=now.num_particles,
        num_steps=now.num_steps,
        max_tail=arena.tail(config, config.lag),
        max_arena=arena.arena(config, config.lag),
        deciders=frozenset({of_config} if drafts else {Weigh(), VerifyTogether(), of_config}),
        needs=frozenset({Need.GREEDY, *powered}),
    )


def shape_of_any(config: SMCConfig, budget: Budget | None, logprobs: LogprobWidths) -> RoundShape:
    """Return the shape of batches of requests that set any options that need no host."""
    shape = shape_of_server(config, budget)._replace(
        max_tail=arena.max_tail(config), max_arena=arena.max_arena(config), logprobs=logprobs
    )
    each = {VerifyEach(chains) for chains in shape.extends}
    every = shape._replace(deciders=frozenset({Weigh(), VerifyTogether(trees=True), *each}))
    return every.having(
        *(Need.FILTERS, Need.EDITS, Need.POWER, Need.PARTICLES, Need.OPEN_TOKEN),
    )


def shape_of(reqs: list[Req], returns_logprobs: bool = False) -> RoundShape:
    """Return the shape of a batch, from which SGLang reads log-probabilities or not.

    Under the overlap schedule the host's numbers are one round old, and never too small.
    """
    states = [state_of(req) for req in reqs]
    configs = [state.now for state in states]
    each = zip(reqs, states, strict=True)
    tails = (arena.tail(union(own.last, own.now), arena.remaining(req)) for req, own in each)
    deciders = frozenset(map(decider_of, configs))
    together = [one for one in deciders if isinstance(one, VerifyTogether)]
    if len(together) > 1:  # one for both
        deciders = deciders.difference(together) | {VerifyTogether(trees=True)}
    in_turn = math.lcm(*(config.num_chains for config in configs))
    most = max(config.num_particles for config in configs)
    return RoundShape(
        budget=states[0].budget,
        num_particles=-(-most // in_turn) * in_turn,  # chains of a particle are consecutive rows
        num_steps=max(config.num_steps for config in configs),
        max_tail=max(tails),
        max_arena=max(end - start for start, end in (state.arena for state in states)),
        deciders=deciders,
        needs=frozenset().union(*map(needs_of, reqs, configs)),
        logprobs=LogprobWidths.of(reqs, returns_logprobs),
    )


def decider_of(config: RequestConfig) -> Decider:
    """Return what decides for a request."""
    if config.weighs:
        return VerifyEach(config.num_chains) if config.extends else Weigh()
    return VerifyTogether(chains=not config.branches, trees=config.branches)


def needs_of(req: Req, config: RequestConfig) -> Iterator[Need]:
    """Yield what a request needs."""
    needs = {
        Need.FILTERS: uses_filters(req),
        Need.GREEDY: is_greedy(req),
        Need.EDITS: has_edits(req),
        Need.POWER: config.power != 1.0,
        Need.PARTICLES: config.return_particles,
        Need.TRACE: config.trace,
        Need.OPEN_TOKEN: not config.is_normalized,
        Need.RULES: has_rules(req),
        Need.POTENTIALS: has_scorers(req),
        Need.MATCHES: config.uses_matches,
    }
    return (need for need, is_needed in needs.items() if is_needed)


class Tables(NamedTuple):
    """Device tables with a row for each request of SGLang's request pool; row 0 pads batches."""

    requests: RequestTable  # options
    edits: EditTable  # logit edits
    particles: ParticleTable  # sequences, weights, ends
    counters: CounterTable  # statistics of rounds
    ledger: Ledger  # KV slots, in SGLang's own req_to_token and in tables of particles
    ops: Ops  # on these

    @classmethod
    def of(
        cls,
        config: SMCConfig,
        ops: Ops,
        req_to_token: torch.Tensor,
        *,
        num_slots: int,
        vocab_size: int,
        device: str,
    ) -> "Tables":
        """Allocate tables, empty but for the padding row.

        Args:
            req_to_token: ``[num_rows, width]``, SGLang's, the padding row included.
            num_slots: size of the KV pool, the padding page included.
            vocab_size: V, of the target's logits.
        """
        num_rows, num_particles = len(req_to_token), config.num_particles
        max_tail, tail_width = arena.max_tail(config), arena.tail_width(config)
        tails = torch.zeros(num_rows * num_particles, tail_width, dtype=torch.int32, device=device)
        tables = cls(
            requests=RequestTable(num_rows, vocab_size, device),
            edits=EditTable(num_rows, vocab_size, device),
            particles=ParticleTable(num_rows, num_particles, max_tail, device),
            counters=CounterTable(num_rows, device, ops),
            ledger=ops.ledger(
                req_to_token,
                tails,
                num_particles=num_particles,
                max_tail=max_tail,
                num_slots=num_slots,
            ),
            ops=ops,
        )
        tables._begin_padding(config, device)
        return tables

    def sizes(self) -> dict[str, int]:
        """Return bytes by purpose."""
        state = self.requests, self.edits, self.particles, self.counters
        return {
            "rows of requests": tensor_bytes(self.ledger.table),
            "rows of particles": tensor_bytes(self.ledger.tails),
            "state of requests": tensor_bytes(state),
            "marks of KV slots": tensor_bytes(self.ledger.rank),
        }

    def _begin_padding(self, config: SMCConfig, device: str) -> None:
        """Give SGLang's padding row ended particles, which fill up batches of captured rounds."""
        params, num_particles = SamplingParams(max_new_tokens=1), config.num_particles
        self.requests.write([Start(0, 0, params, request_config(config, None), frozenset())])
        row = torch.zeros(1, dtype=torch.int64, device=device)
        zeros = on_device(device, [zero_counters(1)], torch.float64)
        self.counters.begin(row, zeros)
        self.particles.begin(
            row,
            first_tokens=row,
            num_emitted=row,
            log_evidence=torch.zeros_like(row, dtype=torch.float64),
            num_particles=row + num_particles,
            ended=torch.ones(1, num_particles, dtype=torch.bool, device=device),
        )
