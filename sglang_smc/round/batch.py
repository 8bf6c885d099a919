"""Define the inputs of a round, its shape on the host, and the tables that it reads."""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.kv import arena
from sglang_smc.kv.sizes import tensor_bytes
from sglang_smc.kv.transfer import on_device
from sglang_smc.options.policy import Policy
from sglang_smc.options.request import Budget, RequestConfig, apply_budget, request_config, union
from sglang_smc.options.server import SMCConfig
from sglang_smc.rules.registry import has_rules, has_scorers
from sglang_smc.smc.deciding import Decider, Plain, VerifyEach, VerifyTogether, Weigh
from sglang_smc.smc.ledger import Ledger
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.settings import OF_PLAIN, Need
from sglang_smc.state.edits import EditTable, has_edits
from sglang_smc.state.logprobs import NO_LOGPROBS, LogprobWidths
from sglang_smc.state.metrics import CounterTable, zero_counters
from sglang_smc.state.particles import ParticleTable
from sglang_smc.state.request import RequestState, state_of
from sglang_smc.state.settings import RequestTable, Start, is_greedy, uses_filters


class RoundShape(NamedTuple):
    """Sizes and kinds in a batch, from the host's state; tensors are cut to them."""

    budget: Budget | None  # that bounds N and K in this round
    num_particles: int  # N: the most of a request
    num_steps: int  # K: the most tokens that a request drafts per round
    max_tail: int  # the longest tail in the round, before it is narrowed
    max_arena: int  # the most KV slots of a request beyond `RoundInputs.committed`
    needs: frozenset[Need] = frozenset()
    # Of these, the first for the groups of no other; none for `plain.play_plainly`.
    deciders: tuple[Decider, ...] = ()
    logprobs: LogprobWidths = NO_LOGPROBS  # of the log-probabilities that requests return
    extras: frozenset[str] = frozenset()  # names of `round.extras` that requests ask for

    def needing(self, needs: Iterable[Need]) -> "RoundShape":
        """Return the shape with other needs, and their deciders."""
        needs = frozenset(needs)
        deciders: tuple[Decider, ...] = ()
        if needs & {Need.VERIFIES, Need.TREES}:
            deciders += (VerifyTogether(),)
        if Need.EXTENDS in needs:
            deciders += (VerifyEach(),)
        if Need.WEIGHS in needs:
            deciders += (Weigh(),)
        if self.num_steps == 0:  # the target draws the next token, in every mode
            is_single = self.skips_draft and self.max_tail <= 1
            is_plain = is_single and not self.extras and needs <= OF_PLAIN
            deciders = () if is_plain else (Plain(),)
        return self._replace(needs=needs, deciders=deciders)

    def scoring(self, logprobs: LogprobWidths) -> "RoundShape":
        """Return the shape of requests that ask for log-probabilities, too."""
        return self._replace(logprobs=logprobs, extras=self.extras | {"return_logprob"})

    @property
    def skips_draft(self) -> bool:
        """Return whether a draft that has `late_tokens` reads this round's later."""
        return self.num_steps == 0 and self.num_particles == 1

    def lacks(self, other: "RoundShape") -> list[str]:
        """Return, in words, the options that another shape supports and this shape lacks."""
        pairs = zip(self._sizes().items(), other._sizes().values(), strict=True)
        lacking = [name for (name, size), needed in pairs if size < needed]
        lacking += sorted(need.value for need in other.needs - self.needs)
        return lacking + sorted(other.extras - self.extras)

    def _sizes(self) -> dict[str, int]:
        """Return sizes: a shape with no smaller one supports those of another."""
        return {
            "more particles": self.num_particles,
            "more drafted tokens": self.num_steps,
            "longer tails": self.max_tail,
            "larger arenas": self.max_arena,
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
        known = [(state.arena[1], *state.config_now.round_sizes) for state in states]
        columns = list(zip(*known, strict=True))
        return cls(batch.req_pool_indices, batch.seq_lens.long(), on_device(device, columns))

    @property
    def arena_ends(self) -> torch.Tensor:
        """Return where the requests' rows end, ``[G]`` int64: tokens with a slot."""
        return self.known[0]

    @property
    def sizes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return N, K and whether the round only verifies, ``[G]`` int64 each."""
        _, num_particles, num_steps, is_exact = self.known.unbind()
        return num_particles, num_steps, is_exact

    def of_places(self, places: list[int]) -> "RoundInputs":
        """Return the inputs of the requests at these places."""
        index = on_device(self.rows.device, places)
        return RoundInputs._make(column.index_select(-1, index) for column in self)

    def split(self, most: int) -> "list[RoundInputs]":
        """Return the inputs of slices of at most ``most`` groups."""
        columns = (column.split(most, dim=-1) for column in self)
        return [RoundInputs._make(part) for part in zip(*columns, strict=True)]

    @classmethod
    def of_padding(
        cls, config: SMCConfig, budget: Budget | None, size: int, device: str, length: int = 1
    ) -> "RoundInputs":
        """Return the inputs of ``size`` groups on SGLang's padding row, with ended particles.

        Its sequence has ``length`` tokens, by default one, in slot 0, so that there is KV to read.
        """
        rows = torch.zeros(size, dtype=torch.int64, device=device)
        known = [length, *map(int, apply_budget(config, budget).round_sizes)]
        columns = on_device(device, known).unsqueeze(1).repeat(1, size)
        return cls(rows, rows + length, columns)


def shape_of_server(config: SMCConfig, budget: Budget | None = None) -> RoundShape:
    """Return the largest shape of batches of requests that set only sizes.

    On a ``budget`` the tails and arenas of earlier, larger budgets may still exist, but for plain
    decoding, whose first round after them is of a larger shape.
    """
    now = apply_budget(config, budget)
    needs = {Need.GREEDY, *_needs_of_mode(now)}
    if now.num_steps == 0:  # without draft tokens weighing and verifying are the same
        needs |= {Need.WEIGHS, Need.VERIFIES}
    if config.power != 1.0:
        needs |= {Need.POWER, Need.OPEN_TOKEN}
    shape = RoundShape(
        budget=budget,
        num_particles=now.num_particles,
        num_steps=now.num_steps,
        max_tail=arena.tail(now if now.num_steps == 0 else config, config.lag),
        max_arena=arena.arena(config, config.lag),
    )
    return shape.needing(needs)


def shape_of_any(config: SMCConfig, budget: Budget | None, logprobs: LogprobWidths) -> RoundShape:
    """Return the shape of batches of requests that set any options that need no host."""
    shape = shape_of_server(config, budget)._replace(
        max_tail=arena.max_tail(config),
        max_arena=arena.max_arena(config),
        extras=frozenset({"return_particles"}),
    )
    shape = shape.scoring(logprobs)
    modes = {Need.WEIGHS, Need.VERIFIES, Need.TREES}
    others = {Need.FILTERS, Need.EDITS, Need.POWER, Need.OPEN_TOKEN}
    return shape.needing(shape.needs | modes | others)


def shape_of(reqs: list[Req], returns_logprobs: bool = False) -> RoundShape:
    """Return the shape of a batch, from which SGLang reads log-probabilities or not.

    Under the overlap schedule the host's numbers are one round old, and never too small.
    """
    states = [state_of(req) for req in reqs]
    configs = [state.config_now for state in states]
    widest = [union(state.config_before, state.config_now) for state in states]
    tails = map(arena.tail, widest, map(arena.remaining, reqs))
    shape = RoundShape(
        budget=states[0].budget,
        num_particles=max(config.num_particles for config in configs),
        num_steps=max(config.num_steps for config in configs),
        max_tail=max(tails),
        max_arena=max(end - start for start, end in (state.arena for state in states)),
        extras=frozenset().union(*(config.extras for config in configs)),
    )
    logprobs = LogprobWidths.of(reqs, returns_logprobs)
    if logprobs.own:
        shape = shape.scoring(logprobs)
    return shape.needing(chain.from_iterable(set(map(_needs_of, reqs, states))))


class BatchPart(NamedTuple):
    """Requests of a batch that play a round together."""

    places: list[int]  # in the batch
    reqs: list[Req]
    inputs: RoundInputs
    shape: RoundShape


#: Extras of which those of two rounds are joined; with others a batch is one round.
_JOINED = frozenset({"return_logprob"})


def groups_of(batch: ScheduleBatch, inputs: RoundInputs, policy: Policy | None) -> list[BatchPart]:
    """Return the rounds of a batch: one, or two if these take less time.

    A round takes as long as its largest request does for all. Where the load has the server reduce
    N and K, a request that keeps its own would cost all others theirs.

    Args:
        policy: adapts N and K; None if they stay.
    """
    shape = shape_of(batch.reqs, batch.return_logprob)
    places = list(range(len(batch.reqs)))
    whole = [BatchPart(places, batch.reqs, inputs, shape)]
    budget = shape.budget
    if policy is None or budget is None or not shape.extras <= _JOINED:
        return whole
    sizes = [state_of(req).sizes for req in batch.reqs]
    larger = [i for i, of in enumerate(sizes) if of != of.within(budget)]
    others = [i for i, of in enumerate(sizes) if of == of.within(budget)]
    if not larger or not others or not policy.pays_apart(len(larger), len(others), budget):
        return whole
    found = []
    for some, bound in ((larger, policy.top), (others, budget)):
        reqs = [batch.reqs[i] for i in some]
        of_some = shape_of(reqs, batch.return_logprob)._replace(budget=bound)
        found.append(BatchPart(some, reqs, inputs.of_places(some), of_some))
    return found


def _needs_of_mode(config: SMCConfig) -> list[Need]:
    if not config.weighs:
        return [Need.VERIFIES]
    if not config.extends:
        return [Need.WEIGHS]
    return [Need.EXTENDS]


def _needs_of(req: Req, state: RequestState) -> frozenset[Need]:
    if state.needs is None:
        state.needs = frozenset(_find_needs(req, state.config_now))
    return state.needs


def _find_needs(req: Req, config: RequestConfig) -> list[Need]:
    needs = {
        Need.FILTERS: uses_filters(req),
        Need.GREEDY: is_greedy(req),
        Need.EDITS: has_edits(req),
        Need.POWER: config.power != 1.0,
        Need.OPEN_TOKEN: not config.is_normalized,
        Need.RULES: has_rules(req),
        Need.POTENTIALS: has_scorers(req),
        Need.MATCHES: config.uses_matches,
    }
    of_mode = [Need.TREES] if config.branches else _needs_of_mode(config)
    return of_mode + [need for need, is_needed in needs.items() if is_needed]


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
        num_rows = len(req_to_token)
        num_particles = config.num_particles
        max_tail = arena.max_tail(config)
        tail_width = arena.tail_width(config)
        tails = torch.zeros(num_rows * num_particles, tail_width, dtype=torch.int32, device=device)
        tables = cls(
            requests=RequestTable(num_rows, vocab_size, device),
            edits=EditTable(num_rows, vocab_size, device),
            particles=ParticleTable(num_rows, num_particles, max_tail, device, ops),
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
        tables.begin_padding(config)
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

    def begin_padding(self, config: SMCConfig, num_rows: int = 1) -> None:
        """Give the first rows ended particles.

        Row 0 keeps them: SGLang's padding row fills up batches of captured rounds.
        """
        params = SamplingParams(max_new_tokens=1)
        num_particles = config.num_particles
        start = Start(0, 0, params, request_config(config, None), frozenset())
        self.requests.write([start._replace(row=row) for row in range(num_rows)])
        device = self.ledger.device
        rows = torch.arange(num_rows, device=device)
        zeros = on_device(device, [zero_counters(1)] * num_rows, torch.float64)
        self.counters.begin(rows, zeros)
        none = torch.zeros_like(rows)
        self.particles.begin(
            rows,
            first_tokens=none.unsqueeze(1),
            num_emitted=none,
            log_evidence=none.double(),
            num_particles=none + num_particles,
            ended=torch.ones(num_rows, num_particles, dtype=torch.bool, device=device),
        )
