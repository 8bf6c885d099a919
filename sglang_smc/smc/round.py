"""Play rounds of SMC speculative decoding over any two models: the library.

    rounds = Round(target, proposer, num_steps=4, stop_tokens=(2,), max_new_tokens=64)
    state = rounds.begin(prompts, num_particles=8)
    while not state.population.ended.all():
        state, decision = rounds.step(state, seeds)

A server's round (`sglang_smc.round.play`) has the same steps with KV slots, logit edits, rules that
read text, and tokens that are emitted before a text has ended; its texts are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch

from sglang_smc.smc.deciding import Decider, Drafts, Plain, Scored, VerifyEach, Weigh, no_drafts
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import NO_TAIL, Population
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.weighing import SCHEMES, Block, Decision

Draw = Callable[[torch.Tensor, Purpose], torch.Tensor]
"""Uniforms of a round, at positions in the output ``[G, N, ...]``."""


class Proposer(Protocol):
    """Provide logits of q, from which drafts are sampled."""

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[R, V]`` of the token that follows each text.

        Args:
            texts: ``[R, L]`` int64, of which only the first ``lengths`` ``[R]`` tokens count.
        """
        ...


class Target(Protocol):
    """Provide logits of p, of which answers should be samples."""

    def chain_logits(
        self, texts: torch.Tensor, lengths: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        """Return the logits ``[R, C, V]`` behind each of the last ``num_columns`` tokens of texts.

        The other arguments are as for `Proposer.next_logits`.
        """
        ...


class State(NamedTuple):
    """Particles between rounds."""

    prompts: torch.Tensor  # [G, P] int64
    population: Population  # whose tails are all that was generated

    def texts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the texts of all particles ``[G * N, L]``, and their lengths ``[G * N]``."""
        tails, lengths = self.population.texts[:, :, 1:], self.population.lengths
        prompts = self.prompts[:, :-1].unsqueeze(1).expand(-1, tails.shape[1], -1)
        texts = torch.cat([prompts, tails], 2).flatten(0, 1)
        return texts, (lengths + self.prompts.shape[1]).flatten()


@dataclass(frozen=True)
class Round:
    """Rounds of requests with the same options."""

    target: Target
    proposer: Proposer
    decider: Decider = field(default_factory=Weigh)
    num_steps: int = 4  # K: draft tokens of a round
    max_new_tokens: int = 64
    stop_tokens: tuple[int, ...] = ()
    temperature: float = 1.0
    draft_temperature: float | None = None  # None: that of the target
    power: float = 1.0  # the target distribution is raised to it
    ess_threshold: float = 0.5
    evidence_threshold: float = 0.5  # c; infinite: verification alone decides
    resample_each_token: bool = False
    scheme: str = "systematic"  # of `SCHEMES`
    ops: Ops = field(default_factory=Ops)

    def __post_init__(self) -> None:
        """Raise ValueError for a temperature or a scheme that there is not."""
        if min(self.temperature, self.draft_temperature or 1.0) <= 0:
            raise ValueError(
                "A temperature is 0 or less; allowed: above 0. For the target's own "
                "likeliest text use a small one, as 0.01."
            )
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme is {self.scheme!r}; allowed: {', '.join(SCHEMES)}.")

    def begin(self, prompts: torch.Tensor, num_particles: int, num_emitted: int = 0) -> State:
        """Return N equal particles of each prompt, ``[G, P]`` int64.

        Args:
            num_emitted: tokens at the end of the prompts that count as output.
        """
        size, device = len(prompts), prompts.device
        width = NO_TAIL + self.max_new_tokens + self.num_steps
        texts = torch.zeros(size, num_particles, width, dtype=torch.int64, device=device)
        texts[:, :, :2] = prompts[:, -2:].unsqueeze(1)
        none = torch.zeros_like(texts[:, :, 0])  # [G, N]
        population = self.ops.population(
            texts=texts,
            lengths=none,
            ended=none.bool(),
            log_weights=none.double(),
            num_emitted=none[:, 0] + num_emitted,
            log_evidence=none[:, 0].double(),
            present=none == 0,
            roots=torch.arange(num_particles, device=device).expand_as(none),
            unread=none[:, 0].bool(),
            fidelity=none.double().unsqueeze(2).expand(-1, -1, len(NAMES)),
        )
        return State(prompts, population)

    def step(self, state: State, seeds: torch.Tensor) -> tuple[State, Decision]:
        """Advance all particles by a round; where all have ended, one is drawn for all.

        Args:
            seeds: ``[G]`` int64 of the requests, the same in all rounds.
        """
        before, decider = state.population, self.decider if self.num_steps else Plain()
        position = before.round_position.expand_as(before.lengths)
        seeds = self.ops.round_seeds(seeds, position[:, 0])
        draw = partial(self.ops.uniforms, seeds)
        weighs = torch.full_like(seeds, decider.weighs, dtype=torch.bool)
        siblings = before.present & weighs.unsqueeze(1)
        drafts, read = self._propose(state, draw, siblings)
        logits = self.target.chain_logits(*read.texts(), self.num_steps + 1)
        p = self._distribution(logits.unflatten(0, siblings.shape).flatten(1, 2), self.temperature)
        log_p = p.score(torch.nn.functional.pad(drafts.tokens, (0, 1)))
        block = self._block(before, drafts, log_p[:, :, :-1], partial(draw, position))
        scored = Scored(
            population=before,
            drafts=drafts,
            p=p,
            log_p=log_p,
            block=block,
            weighs=weighs,
            powered=self.power != 1.0,
            accept_uniforms=draw(position, Purpose.ACCEPT),
        )
        decision, next_tokens = decider(scored, self.ops)
        extended = before.extend(drafts.tokens, drafts.ends, decision)
        if scored.powered:
            next_tokens, extended = weigh_bonus(
                extended,
                next_tokens,
                power=block.power,
                weighs=weighs,
                weighed=weighs if isinstance(decider, VerifyEach) else None,
            )
        after = self._add_bonus(extended, next_tokens, draw, siblings)
        return State(state.prompts, self._draw_answers(after, seeds)), decision

    def _propose(self, state: State, draw: Draw, siblings: torch.Tensor) -> tuple[Drafts, State]:
        """Draw x_1..x_K ~ q; return them, and the particles with all of them appended."""
        population = state.population
        if self.num_steps == 0:
            return no_drafts(population), state
        steps = torch.arange(self.num_steps, device=siblings.device)
        positions = population.output_lengths.unsqueeze(2) + steps  # [G, N, K]
        uniforms = draw(positions, Purpose.DRAFT)
        texts = population.texts[:, :, 1:]
        same, tokens = self.ops.same_text(texts, population.lengths, siblings), None
        drawn: list[torch.Tensor] = []
        log_q: list[torch.Tensor] = []
        each_q: list[TokenDistribution] = []
        for step in range(self.num_steps):
            stratified, same = self.ops.stratify(uniforms[:, :, step], same, tokens)
            logits = self.proposer.next_logits(*state.texts()).unflatten(0, siblings.shape)
            q = self._distribution(logits, self.draft_temperature or self.temperature)
            tokens, scored = q.sample(stratified)
            grown = state.population.append(tokens.unsqueeze(2), torch.ones_like(siblings))
            state = state._replace(population=grown)
            drawn.append(tokens)
            log_q.append(scored)
            each_q.append(q)
        chains = torch.stack(drawn, 2)
        ends = self._ends(chains, positions)
        up_to_end = (ends.cumsum(2) == ends) & ~population.ended.unsqueeze(2)
        return Drafts(chains, torch.stack(log_q, 2), ends, up_to_end, each_q), state

    def _block(
        self,
        before: Population,
        drafts: Drafts,
        log_p: torch.Tensor,
        numbers: Callable[[Purpose], torch.Tensor],
    ) -> Block:
        """Return the block of a round, with uniforms of ``numbers(purpose)`` ``[G, N]``."""
        size = len(log_p)

        def of_groups(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=log_p.device)

        return Block(
            log_weights=before.log_weights,
            log_p=log_p,
            log_q=drafts.log_q,
            up_to_end=drafts.up_to_end,
            present=before.present,
            power=of_groups(self.power),
            num_steps=of_groups(self.num_steps, torch.int64),
            ess_threshold=of_groups(self.ess_threshold),
            resample_each_token=of_groups(self.resample_each_token, torch.bool),
            evidence_threshold=of_groups(self.evidence_threshold),
            scheme=of_groups(SCHEMES.index(self.scheme), torch.int64),
            keep_uniforms=numbers(Purpose.KEEP)[:, 0],
            uniforms=numbers(Purpose.RESAMPLE),
        )

    def _add_bonus(
        self, before: Population, next_tokens: TokenDistribution, draw: Draw, siblings: torch.Tensor
    ) -> Population:
        """Append one token to each particle that has not ended."""
        positions = before.output_lengths
        own = draw(positions, Purpose.BONUS)
        same = self.ops.same_text(before.texts[:, :, 1:], before.lengths, siblings)
        uniforms, _ = self.ops.stratify(own, same)
        if not self.decider.weighs:  # all particles are copies of one, and stay so
            uniforms = own[:, :1].expand_as(own)
        tokens = next_tokens.draw(uniforms)  # [G, N]
        no_failure = torch.zeros_like(before.num_emitted)
        return before.append_bonus(tokens, self._ends(tokens, positions), no_failure)

    def _draw_answers(self, population: Population, seeds: torch.Tensor) -> Population:
        """Draw a particle by weight where all have ended, for all of its group."""
        finished, never = population.is_finished(), torch.zeros_like(seeds, dtype=torch.bool)
        end = population.narrow(seeds, population.num_emitted, weighs=never, heaviest=never)
        return end.population._replace(
            log_weights=torch.where(finished.unsqueeze(1), 0.0, end.population.log_weights),
            log_evidence=torch.where(finished, end.log_evidence, population.log_evidence),
        )

    def _distribution(self, logits: torch.Tensor, temperature: float) -> TokenDistribution:
        """Return the distributions of rows of logits ``[G, M, V]``."""
        each = torch.full((len(logits),), temperature, device=logits.device)
        return self.ops.distribution.of(logits, each)

    def _ends(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return whether a text ends with each token, in their shape, bool."""
        stops = torch.tensor(self.stop_tokens, dtype=torch.int64, device=tokens.device)
        return torch.isin(tokens, stops) | (positions >= self.max_new_tokens - 1)


def weigh_bonus(
    population: Population,
    next_tokens: TokenDistribution,
    *,
    power: torch.Tensor | None,
    weighs: torch.Tensor,
    weighed: torch.Tensor | None,
) -> tuple[TokenDistribution, Population]:
    """Raise the bonus token's distribution to each power, and weigh by its normaliser.

    Args:
        power: ``[G]`` float64; None where all are 1.
        weighs: ``[G]`` bool: particles have weights of their own.
        weighed: ``[G]`` bool: the decision has weighed it already; None where none has.
    """
    weighs = weighs.unsqueeze(1)
    if power is not None:
        next_tokens, log_sum = next_tokens.to_power(power)
    else:
        log_sum = next_tokens.log_masses()
    log_sum = log_sum.double().view_as(population.log_weights)
    counts = weighs & ~population.ended
    if weighed is not None:
        counts &= ~weighed.unsqueeze(1)
    stuck = (~weighs & (log_sum == -torch.inf)).any(1)
    return next_tokens, population._replace(
        log_weights=population.log_weights + torch.where(counts, log_sum, 0.0),
        # Verified sequences have no weights; -inf marks that no token may follow one.
        log_evidence=population.log_evidence.masked_fill(stuck, -torch.inf),
    )
