"""Define the inputs of a round, its shape on the host, and the tensors between its steps."""

import math
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.kv import arena
from sglang_smc.kv.ledger import Ledger
from sglang_smc.kv.sizes import tensor_bytes
from sglang_smc.kv.transfer import on_device
from sglang_smc.options.request import Budget, apply_budget, request_config, union
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.ngram import Matches
from sglang_smc.rules.registry import TextRules, has_rules, has_scorers
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Population
from sglang_smc.smc.weighing import Decision
from sglang_smc.state.edits import EditTable, has_edits
from sglang_smc.state.logprobs import NO_LOGPROBS, LogprobWidths
from sglang_smc.state.metrics import CounterTable, zero_counters
from sglang_smc.state.particles import ParticleTable
from sglang_smc.state.request import state_of
from sglang_smc.state.settings import RequestTable, Settings, Start, is_greedy, uses_filters


class RoundShape(NamedTuple):
    """Sizes and kinds in a batch, from the host's state; tensors are cut to them."""

    budget: Budget | None  # that bounds N and K in this round
    num_held: int  # the most particles of a request, now or before a resize
    num_particles: int  # N: the most of a request
    num_steps: int  # K: the most tokens that a request drafts per round
    max_tail: int  # the longest tail in the round, before it is narrowed
    max_arena: int  # the most KV slots of a request beyond `RoundInputs.committed`
    greedy: bool  # some request takes the likeliest token
    powered: bool  # some request samples from a power of p
    weighs_drafts: bool  # some request's rounds weigh draft tokens, and resample
    walks: bool  # some request's rounds verify sampled chains as one multi-draft
    # M of each request whose rounds verify each particle's own chains, and resample.
    extends: tuple[int, ...]
    has_open_token: bool  # particles of some request may differ in its first token
    resizes: bool = False  # the number of particles of some request changes
    many_chains: bool = False  # some particle has more chains than one
    filtered: bool = False  # some request uses top-k, top-p or min-p, and is not greedy
    edits: bool = False  # some request has penalties, biases or min_new_tokens
    branches: bool = False  # some request's rounds verify a tree, at temperature 0
    shows_particles: bool = False  # some request sets return_particles
    traces: bool = False  # some request sets trace
    has_rules: bool = False  # some request has rules that read its sequences on the host
    has_scorers: bool = False  # some request has potentials, on the host
    has_matches: bool = False  # some request's drafts are mixed with n-gram matches
    logprobs: LogprobWidths = NO_LOGPROBS  # of the log-probabilities that requests return

    @property
    def skips_draft(self) -> bool:
        """Return whether a draft that `lags` reads the tokens of this round later."""
        return self.num_steps == 0 and self.num_particles == 1

    def lacks(self, other: "RoundShape") -> list[str]:
        """Return, in words, the options that another shape supports and this shape lacks."""
        pairs = zip(self._parts().items(), other._parts().values(), strict=True)
        return [name for (name, mine), theirs in pairs if not mine >= theirs]

    def _parts(self) -> dict[str, Any]:
        """Return sizes, kinds and sets: a shape with no smaller value supports all of another."""
        return {
            "more particles": self.num_particles,
            "more drafted tokens": self.num_steps,
            "longer tails": self.max_tail,
            "larger arenas": self.max_arena,
            "top-k, top-p or min-p": self.filtered,
            "temperature 0": self.greedy,
            "penalties, biases or min_new_tokens": self.edits,
            "a power of p": self.powered,
            "mode smc": self.weighs_drafts,
            "a mode that verifies": self.walks,
            "verified proposals": frozenset(self.extends),
            "trees at temperature 0": self.branches,
            "return_particles": self.shows_particles,
            "trace": self.traces,
            "particles that differ in the first token": self.has_open_token,
            "structured output, stop texts or a custom logit processor": self.has_rules,
            "potentials": self.has_scorers,
            "n-gram matches": self.has_matches,
            "log-probabilities": self.logprobs.own,
            f"more than {self.logprobs.top} top_logprobs": self.logprobs.top,
            f"more than {self.logprobs.listed} token_ids_logprob": self.logprobs.listed,
        }


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

    def extends_by(self, chains: int) -> torch.Tensor:
        """Return the groups whose particles are extended by that many chains each, ``[G]`` bool."""
        extends = self.settings.extends
        is_only = len(self.shape.extends) == 1
        return extends if is_only else extends & (self.settings.chains == chains)


def shape_of_server(config: SMCConfig, budget: Budget | None = None) -> RoundShape:
    """Return the largest shape of batches of requests that set only sizes.

    On a ``budget`` the tails and arenas of earlier, larger budgets may still exist.
    """
    now = apply_budget(config, budget)
    drafts = now.num_steps > 0  # without draft tokens weighing and verifying are the same
    return RoundShape(
        budget=budget,
        num_held=now.num_particles,
        num_particles=now.num_particles,
        num_steps=now.num_steps,
        max_tail=arena.tail(config, config.lag),
        max_arena=arena.arena(config, config.lag),
        greedy=True,
        powered=config.power != 1.0,
        weighs_drafts=(now.weighs and not now.extends) or not drafts,
        walks=not now.weighs or not drafts,
        extends=(now.num_chains,) if now.extends else (),
        many_chains=now.num_chains > 1,
        has_open_token=config.power != 1.0,
    )


def shape_of_any(config: SMCConfig, budget: Budget | None, logprobs: LogprobWidths) -> RoundShape:
    """Return the shape of batches of requests that set any options that need no host."""
    return shape_of_server(config, budget)._replace(
        max_tail=arena.max_tail(config),
        max_arena=arena.max_arena(config),
        filtered=True,
        edits=True,
        powered=True,
        weighs_drafts=True,
        walks=True,
        branches=True,
        shows_particles=True,
        has_open_token=True,
        logprobs=logprobs,
    )


def shape_of(reqs: list[Req], returns_logprobs: bool = False) -> RoundShape:
    """Return the shape of a batch, from which SGLang reads log-probabilities or not.

    Under the overlap schedule the host's numbers are one round old, and never too small.
    """
    states = [state_of(req) for req in reqs]
    configs = [state.now for state in states]
    sizes = [(state.last.num_particles, state.now.num_particles) for state in states]
    each = zip(reqs, states, strict=True)
    tails = (arena.tail(union(own.last, own.now), arena.remaining(req)) for req, own in each)
    extends = tuple(sorted({config.num_chains for config in configs if config.extends}))
    most, in_turn = max(config.num_particles for config in configs), math.lcm(*extends)
    return RoundShape(
        budget=states[0].budget,
        num_held=max(map(max, sizes)),
        resizes=any(before != after for before, after in sizes),
        num_particles=-(-most // in_turn) * in_turn,  # chains of a particle are consecutive rows
        num_steps=max(config.num_steps for config in configs),
        max_tail=max(tails),
        max_arena=max(end - start for start, end in (state.arena for state in states)),
        filtered=any(map(uses_filters, reqs)),
        greedy=any(map(is_greedy, reqs)),
        edits=any(map(has_edits, reqs)),
        powered=any(config.power != 1.0 for config in configs),
        weighs_drafts=any(config.weighs and not config.extends for config in configs),
        extends=extends,
        many_chains=in_turn > 1,
        walks=not all(config.weighs or config.branches for config in configs),
        branches=any(config.branches for config in configs),
        shows_particles=any(config.return_particles for config in configs),
        traces=any(config.trace for config in configs),
        has_open_token=not all(config.is_normalized for config in configs),
        has_rules=any(has_rules(req) for req in reqs),
        has_scorers=any(has_scorers(req) for req in reqs),
        has_matches=any(config.uses_matches for config in configs),
        logprobs=LogprobWidths.of(reqs, returns_logprobs),
    )


class Drafts(NamedTuple):
    """Draft tokens and their log-probabilities."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens
    ends: torch.Tensor  # [G, N, K] bool: the sequence ends with this token
    up_to_end: torch.Tensor  # [G, N, K] bool: up to the particle's end, within its request's K
    q: list[TokenDistribution] | None  # of G * N draws each; kept where some group verifies
    coins: torch.Tensor | None = None  # [G] uniforms for the columns where fidelity is measured
    held: TokenDistribution | None = None  # q of G * N rows in these columns


def no_drafts(population: Population) -> Drafts:
    """Return the drafts of a round with K = 0."""
    nothing = population.tokens[:, :, :0]  # [G, N, 0]
    return Drafts(nothing, nothing.float(), nothing.bool(), nothing.bool(), None)


def decide_nothing(
    batch: RoundBatch, population: Population, p: TokenDistribution
) -> tuple[Decision, TokenDistribution]:
    """Return the decision of a round of single chains without drafts: p draws the next token."""
    none = torch.zeros_like(batch.rows)
    no, alone, log_weights = none.bool(), none.unsqueeze(1), population.log_weights
    ess, verified = torch.ones_like(log_weights[:, 0]), ~batch.settings.weighs
    of_particles = alone, log_weights, none.double(), verified
    return Decision(none, alone, log_weights, ess, no, no, *of_particles), p


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
