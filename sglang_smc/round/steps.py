"""The steps of a round, each for all particles of all running requests at once.

`worker.SMCWorker._play` puts them in order. Only requests that stop at a string make them wait
for the device.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_smc.memory.ledger import Ledger
from sglang_smc.models.attention import KVLocations, ParticleForward
from sglang_smc.ops.interface import Ops
from sglang_smc.requests import stopping
from sglang_smc.requests.failures import failure_of_round
from sglang_smc.requests.grammar import mark_terminated
from sglang_smc.requests.logit_edits import edited
from sglang_smc.requests.state import state_of
from sglang_smc.round.batch import RoundBatch
from sglang_smc.round.decision import (
    Decision,
    Drafts,
    all_log_probs,
    log_mass_of_path,
    no_drafts,
    one_lineage,
    open_columns,
)
from sglang_smc.round.select import by_method, choose
from sglang_smc.smc import exact, mixed, resizing, rounds
from sglang_smc.smc.proposal import token_log_probs
from sglang_smc.smc.randomness import Purpose
from sglang_smc.state.distribution import TokenDistribution
from sglang_smc.state.logprobs import logprob_distribution
from sglang_smc.state.population import Population


class DraftSlots(NamedTuple):
    """Where a round reads and writes: for the last token but one, the last and the K drafts."""

    slots: torch.Tensor  # [K + 2, G, N]
    positions: torch.Tensor  # [K + 2, G, N]
    locations: KVLocations


class Steps:
    """Draft, score, decide, extend, bonus and collapse; populations in, populations out."""

    def __init__(
        self,
        target: ParticleForward,
        draft: ParticleForward,
        ledger: Ledger,
        ops: Ops,
        max_lag: int,
    ) -> None:
        self.target = target
        self.draft = draft
        self._ledger = ledger
        self._ops = ops
        self._max_lag = max_lag

    def reserve(self, batch: RoundBatch, population: Population) -> DraftSlots:
        """Find the KV slots of the next K + 1 positions of each particle, and of the one before."""
        starts = batch.committed.unsqueeze(1) + population.lengths
        slots = self._ledger.reserve(
            batch.rows,
            allocated=batch.allocated,
            starts=starts,
            idle=population.ended,
            unread=population.unread,
            num_particles=batch.settings.num_particles,
            num_columns=batch.settings.num_steps + 1,
            width=batch.shape.num_steps + 1,
        )
        locations = KVLocations(
            rows=batch.rows,
            committed=batch.committed,
            particle_rows=self._ledger.particle_rows(batch.rows, batch.shape.num_particles),
            max_tail=batch.shape.max_tail + 1,  # ended ones compute past their last token, too
        )
        slots = slots.permute(2, 0, 1).contiguous()  # each draft step's in one piece
        column = torch.arange(-1, len(slots) - 1, device=starts.device)
        return DraftSlots(slots, starts + column.view(-1, 1, 1), locations)

    def resize(self, batch: RoundBatch, population: Population) -> Population:
        """Give groups the particles that they run with from now on, if those are more or fewer."""
        methods = sorted({state_of(req).config.resampling_method for req in batch.reqs})
        before = population.log_weights, population.present
        after = batch.settings.num_particles, self._once(batch, population, Purpose.RESIZE)
        step = by_method(batch.settings.scheme, methods, partial(resizing.resize, *before, *after))
        # The draft may have yet to read the last emitted token, through the particle's own row.
        self._ledger.descend(
            batch.rows,
            committed=batch.committed - 1,
            ancestors=step.ancestors,
            max_tail=batch.shape.max_tail,
        )
        return population.resize(step.ancestors, step.present)._replace(
            log_weights=step.log_weights,
            log_evidence=population.log_evidence + step.log_evidence,
        )

    def propose(self, batch: RoundBatch, population: Population, reserved: DraftSlots) -> Drafts:
        """Draft x_1..x_K ~ q, one after another, from each particle's last token.

        The last drafted token is not read: if it is kept, the next round reads it with the
        token behind it, in the same pass. Without drafts the draft reads along all the same.
        """
        num_steps = batch.shape.num_steps
        if num_steps == 0:
            self._draft_logits(0, population, None, reserved)
            return no_drafts(population)
        column = torch.arange(num_steps, device=batch.rows.device)
        positions = population.output_lengths.unsqueeze(2) + column
        noise = self._uniforms(batch, positions, Purpose.DRAFT).permute(2, 0, 1)
        noise = noise.contiguous()  # [K, G, N]: each step's in one piece
        same_text, tokens = self._same_text(batch, population), None
        drawn, log_q, laws = [], [], []
        for step in range(num_steps):
            logits = self._draft_logits(step, population, tokens, reserved)  # [G, N, V]
            law = self._draft_law(batch, population, logits, positions[:, :, step], drawn)
            spread, same_text = self._ops.stratify(noise[step], same_text, tokens)
            tokens, log_q_of_tokens = law.sample(self._ops, spread)
            drawn.append(tokens)
            log_q.append(log_q_of_tokens)
            laws.append(law)
        chains = torch.stack(drawn, dim=2)
        ends = self._ends(batch, population, chains)
        return Drafts(
            chains,
            torch.stack(log_q, dim=2),
            ends,
            open_columns(ends, batch.settings.num_steps, population.ended),
            all_log_probs(laws, chains.shape[:2]) if batch.shape.verifies else None,
        )

    def _draft_law(
        self,
        batch: RoundBatch,
        population: Population,
        logits: torch.Tensor,
        positions: torch.Tensor,
        drawn: list[torch.Tensor],
    ) -> TokenDistribution:
        """q after the tokens ``[G, N]`` that have been ``drawn``, from ``logits`` ``[G, N, V]``."""
        allowed = None
        if batch.edits or batch.masks:
            chains = torch.stack(drawn, dim=2) if drawn else population.tokens[:, :, :0]
            logits = edited(batch.edits, logits.unsqueeze(2), chains, len(drawn)).squeeze(2)
            allowed = batch.masks.after(chains).squeeze(2) if batch.masks else None
        return batch.settings.law(logits, positions, batch.shape.kinds, allowed=allowed, draft=True)

    def _draft_logits(
        self,
        step: int,
        population: Population,
        tokens: torch.Tensor | None,
        reserved: DraftSlots,
    ) -> torch.Tensor:
        """The draft's logits after the last token, or after the one just drawn: ``[G, N, V]``."""
        slots, positions, locations = reserved
        if tokens is None:
            two = slots[:2].permute(1, 2, 0)
            return self.draft.next_logits(population.last_two, positions[0], two, locations)
        here = slots[step + 1].unsqueeze(2)
        return self.draft.next_logits(tokens.unsqueeze(2), positions[step + 1], here, locations)

    def score(
        self, batch: RoundBatch, population: Population, drafts: Drafts, reserved: DraftSlots
    ) -> tuple[TokenDistribution, TokenDistribution | None]:
        """One target pass over [last, x_1..x_K]: p of what comes next, for G * N * (K + 1) rows.

        And what log-probabilities are taken from, where some request wants them.
        """
        slots = reserved.slots[1:].permute(1, 2, 0)  # [G, N, K + 1]
        last = population.last_tokens.unsqueeze(2)
        # Behind an end nothing is read that could break the columns before it: 0 * NaN is NaN.
        read = torch.where(drafts.before_end, drafts.tokens, last)
        chain = torch.cat([last, read], dim=2)
        logits = self.target.chain_logits(chain, reserved.positions[1], slots, reserved.locations)
        logits = edited(batch.edits, logits, drafts.tokens, 0)  # [G, N, K + 1, V]
        column = torch.arange(chain.shape[2], device=chain.device)
        positions = (population.output_lengths.unsqueeze(2) + column).flatten(1)
        allowed = batch.masks.along(drafts.tokens).flatten(1, 2) if batch.masks else None
        of_chains = logits.flatten(1, 2), positions, batch.shape.kinds
        law = batch.settings.law(*of_chains, allowed=allowed)
        if not batch.shape.logprobs.own:
            return law, None
        return law, logprob_distribution(batch.settings, *of_chains, allowed=allowed)

    def decide(
        self, batch: RoundBatch, population: Population, drafts: Drafts, law: TokenDistribution
    ) -> Decision:
        """Weigh or verify, as each request asked for."""
        if batch.shape.num_steps == 0:  # nothing to verify: the target draws the next token
            weighed = self.weigh(batch, population, drafts, law)
            return weighed._replace(verified=~batch.settings.weighs)
        if not batch.shape.verifies:
            return self.weigh(batch, population, drafts, law)
        verified = self.verify(batch, population, drafts, law)
        if not batch.shape.weighs:
            return verified
        weighed = self.weigh(batch, population, drafts, law)
        return choose(batch.settings.weighs, weighed, verified)

    def weigh(
        self, batch: RoundBatch, population: Population, drafts: Drafts, law: TokenDistribution
    ) -> Decision:
        """Weigh by log p - log q up to each particle's end; where the ESS is low, resample."""
        # The last column has no drafted token to score: any will do.
        tokens = torch.nn.functional.pad(drafts.tokens, (0, 1))  # [G, N, K + 1]
        log_p = law.score(self._ops, tokens)
        collected = self._collect(
            batch,
            population.log_weights,
            log_p[:, :, :-1],
            drafts.log_q,
            drafts.before_end,
            batch.settings.power,
            batch.settings.rules,
            population.present,
            self._once(batch, population, Purpose.KEEP)[:, 0],
            self._once(batch, population, Purpose.RESAMPLE),
        )
        cut, num_kept, resampled = collected
        group = torch.arange(len(batch.rows), device=tokens.device).unsqueeze(1)
        chain = group * tokens.shape[1] + resampled.ancestors  # [G, N]
        row = chain * tokens.shape[2] + cut.num_columns.unsqueeze(1)
        return Decision(
            cut,
            num_kept,
            resampled,
            law.of_rows(row.flatten()),
            verified=torch.zeros_like(cut.resample),
            failure=_failure(population, drafts, log_p),
        )

    def _collect(self, batch: RoundBatch, *args: Any) -> rounds.Reweighted:
        """Each request by its own method."""
        # Kernels want a column to work on.
        collect = (
            self._ops.reweight_and_resample
            if batch.shape.num_steps
            else rounds.reweight_and_resample
        )
        return by_method(batch.settings.scheme, batch.shape.methods, partial(collect, *args))

    def verify(
        self, batch: RoundBatch, population: Population, drafts: Drafts, law: TokenDistribution
    ) -> Decision:
        """Keep the columns that the block's evidence covers, or that exact verification accepts.

        Of the two the longer. All particles go on as one winner: they begin and end such a round
        with one text, which is emitted at once.
        """
        assert drafts.law is not None
        settings = batch.settings
        column = torch.arange(drafts.tokens.shape[2], device=drafts.tokens.device)
        positions = population.output_lengths.unsqueeze(2) + column  # [G, N, K]
        log_p = law.log_probs().unflatten(0, (*positions.shape[:2], -1))  # [G, N, K + 1, V]
        found = exact.verify(
            drafts.tokens,
            drafts.ends,
            log_p,
            drafts.law,
            self._uniforms(batch, positions, Purpose.ACCEPT),
            num_chains=settings.num_particles,
            num_steps=settings.num_steps,
        )
        block = mixed.judge(
            token_log_probs(log_p[:, :, :-1], drafts.tokens) - drafts.log_q,
            drafts.before_end,
            population.present,
            settings.num_steps,
            settings.evidence_threshold,
            self._once(batch, population, Purpose.KEEP)[:, 0],
            self._once(batch, population, Purpose.RESAMPLE)[:, 0],
        )
        kept, by_block = mixed.longer(block, found, log_p, drafts.ends, settings.num_steps)
        # Where nothing is kept by evidence, the chains' weights say nothing of the output.
        ess = torch.where(
            settings.evidence_threshold < torch.inf, block.ess, settings.num_particles
        )
        failure = _failure(population, drafts, log_p[..., 0])
        decision = one_lineage(population, kept, ess, by_block, failure)
        if law.log_mass is None:
            return decision
        log_mass = law.log_mass.view(log_p.shape[:3])  # [G, N, K + 1]
        leaves = log_mass_of_path(log_mass, kept, drafts.ends)
        return decision._replace(next_tokens=decision.next_tokens._replace(log_mass=leaves))

    def extend(
        self, batch: RoundBatch, population: Population, drafts: Drafts, decision: Decision
    ) -> Population:
        """Append the drafts that are kept, and let ancestors hand down their texts."""
        column = torch.arange(drafts.tokens.shape[2], device=drafts.tokens.device)
        kept = column < decision.num_kept.unsqueeze(2)  # [G, N, K]
        extended = population.append(drafts.tokens, decision.num_kept)._replace(
            ended=population.ended | (drafts.ends & kept).any(2),
            # The draft has read all but the last that it drafted itself, if it drafted any.
            unread=(decision.cut.num_columns == batch.shape.num_steps)
            & (batch.shape.num_steps > 0),
        )
        return self._descend(batch, extended, decision.resampled)

    def add_bonus(
        self, batch: RoundBatch, population: Population, law: TokenDistribution
    ) -> Population:
        """One more token from the target, after resampling, so that copies part at once."""
        if batch.shape.opens:
            law, population = self._weigh_bonus(batch, population, law)
        noise = self._uniforms(batch, population.output_lengths, Purpose.BONUS)
        spread, _ = self._ops.stratify(noise, self._same_text(batch, population))
        if batch.shape.verifies:
            # After verification all particles go on as one, so they draw one token.
            spread = torch.where(batch.settings.weighs.unsqueeze(1), spread, noise[:, :1])
        tokens, _ = law.sample(self._ops, spread)
        ends = self._ends(batch, population, tokens.unsqueeze(2)).squeeze(2)
        extended = population.append(tokens.unsqueeze(2), (~population.ended).long())
        return extended._replace(ended=population.ended | ends)

    def _weigh_bonus(
        self, batch: RoundBatch, population: Population, law: TokenDistribution
    ) -> tuple[TokenDistribution, Population]:
        """Raise the bonus token's law to each power, and weigh by the mass of what may come."""
        weighs, shape = batch.settings.weighs.unsqueeze(1), population.log_weights.shape
        log_sum = law.log_masses().double()
        if batch.shape.powered:
            powers = batch.settings.power.unsqueeze(1).expand(shape)
            law, log_sum = law.to_power(powers.flatten())
        log_sum = log_sum.view(shape)
        counts = weighs & ~population.ended
        stuck = (~weighs & (log_sum == -torch.inf)).any(1)
        return law, population._replace(
            log_weights=population.log_weights + torch.where(counts, log_sum, 0.0),
            # Verified texts have no weight; this says that no token may follow one.
            log_evidence=population.log_evidence.masked_fill(stuck, -torch.inf),
        )

    def collapse(
        self, batch: RoundBatch, population: Population
    ) -> tuple[Population, torch.Tensor]:
        """The final draw where all have ended, and the same step at the lag bound ``[G]``."""
        finished = population.ended.all(1)
        too_far = population.lengths.amax(1) >= self._max_lag
        forced = too_far & ~finished & batch.settings.weighs
        step = self._ops.collapse(
            population.log_weights,
            finished | forced,
            population.present,
            self._once(batch, population, Purpose.SELECT)[:, 0],
            batch.settings.heaviest,
        )
        return self._descend(batch, population, step), forced

    def _descend(
        self, batch: RoundBatch, population: Population, step: rounds.Resampled
    ) -> Population:
        self._ledger.descend(
            batch.rows,
            committed=batch.committed,
            ancestors=step.ancestors,
            max_tail=batch.shape.max_tail,
        )
        return population.descend(step.ancestors)._replace(
            log_weights=step.log_weights,
            log_evidence=population.log_evidence + step.log_evidence,
        )

    def _same_text(self, batch: RoundBatch, population: Population) -> torch.Tensor:
        """Particles that may share their noise, ``[G, N, N]``: verified chains are independent."""
        may_stratify = population.present & batch.settings.weighs.unsqueeze(1)
        return self._ops.same_text(population.texts[:, :, 1:], population.lengths, may_stratify)

    def _ends(
        self, batch: RoundBatch, population: Population, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Which of the tokens ``[G, N, C]`` that would come next end their text."""
        column = torch.arange(1, 1 + tokens.shape[2], device=tokens.device)
        lengths = population.output_lengths.unsqueeze(2) + column
        ends = batch.settings.ends(tokens.flatten(1), lengths.flatten(1)).view_as(tokens)
        if batch.shape.constrained:
            ends = mark_terminated(ends, batch.reqs, tokens, population)
        return stopping.mark_stop_texts(ends, batch.reqs, tokens, population)

    def _once(self, batch: RoundBatch, population: Population, purpose: Purpose) -> torch.Tensor:
        """Uniforms ``[G, N]`` for what a group decides once a round."""
        place = population.output_lengths.amax(1, keepdim=True).expand_as(population.lengths)
        return self._uniforms(batch, place, purpose)

    def _uniforms(
        self, batch: RoundBatch, positions: torch.Tensor, purpose: Purpose
    ) -> torch.Tensor:
        """Uniforms for the output positions ``[G, N]`` or ``[G, N, C]`` of particles."""
        return self._ops.uniforms(batch.settings.seeds, positions, purpose)


def _failure(population: Population, drafts: Drafts, log_p: torch.Tensor) -> torch.Tensor:
    """Of log-probabilities ``[G, N, K + 1]`` under the target."""
    live = ~population.ended
    return failure_of_round(log_p, drafts.log_q, drafts.before_end, drafts.ends, live)
