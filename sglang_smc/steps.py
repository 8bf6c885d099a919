"""The steps of a round, each for all particles of all running requests at once.

`worker.SMCWorker._round` puts them in order. They wait for the device in two places only:
where the forwards tell attention backends the lengths, and for requests that stop at a
string.
"""

from typing import Any, NamedTuple

import torch

from sglang_smc import stopping
from sglang_smc.forward import ParticleForward, Places
from sglang_smc.groups import Groups
from sglang_smc.ledger import Ledger
from sglang_smc.particles import Population
from sglang_smc.smc import exact, mixed, rounds
from sglang_smc.smc.proposal import power_law, sample, token_log_probs
from sglang_smc.smc.randomness import Purpose, uniforms
from sglang_smc.smc.siblings import same_text, still_same, stratify


class Drafts(NamedTuple):
    """What the draft proposed, and with what probability."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens
    ends: torch.Tensor  # [G, N, K] bool: the text ends with this token
    law: torch.Tensor | None  # [G, N, K, V] log q of all tokens; kept where some group verifies


class Decision(NamedTuple):
    """What becomes of the drafts: weighed or verified, both end in these."""

    cut: rounds.Cut
    num_kept: torch.Tensor  # [G, N] drafted tokens that each particle keeps
    resampled: rounds.Resampled  # who goes on then, and with what weight
    next_log_p: torch.Tensor  # [G, N, V] float64: law of each particle's next token
    verified: torch.Tensor  # [G] bool: exact verification had the last word


class Steps:
    """Draft, score, decide, extend, bonus and collapse; populations in, populations out."""

    def __init__(
        self, target: ParticleForward, draft: ParticleForward, ledger: Ledger, max_lag: int
    ) -> None:
        self.target = target
        self.draft = draft
        self._ledger = ledger
        self._max_lag = max_lag

    def reserve(self, groups: Groups, population: Population) -> torch.Tensor:
        """Free KV slots for the next K + 1 positions of each particle, ``[G, N, K + 1]``."""
        return self._ledger.reserve(
            groups.rows,
            allocated=groups.allocated,
            starts=groups.committed.unsqueeze(1) + population.lengths,
            idle=population.ended,
            num_particles=groups.settings.num_particles,
            num_columns=groups.settings.num_steps + 1,
            width=groups.extent.num_steps + 1,
        )

    def propose(self, groups: Groups, population: Population, slots: torch.Tensor) -> Drafts:
        """Draft x_1..x_K ~ q, one after another, from each particle's last token."""
        starts, places = self._places(groups, population)
        siblings = self._siblings(groups, population)
        tokens, drawn, log_q, laws = population.last_tokens, [], [], []
        num_steps = groups.extent.num_steps
        for step in range(num_steps):
            logits = self.draft.next_logits(
                tokens.unsqueeze(2), starts + step, slots[..., step : step + 1], places
            )
            positions = population.output_lengths + step
            law = groups.settings.log_probs(
                logits, positions, filtered=groups.extent.filtered, draft=True
            )
            noise = self._uniforms(groups, positions, Purpose.DRAFT)
            tokens = sample(law, stratify(noise, siblings))
            siblings = still_same(siblings, tokens)
            drawn.append(tokens)
            log_q.append(token_log_probs(law, tokens))
            laws.append(law if groups.extent.verifies else None)
        # The last drafted token's KV, which the next round's draft reads if the token is kept.
        self.draft.next_logits(tokens.unsqueeze(2), starts + num_steps, slots[..., -1:], places)
        chains = torch.stack(drawn, dim=2)
        return Drafts(
            chains,
            torch.stack(log_q, dim=2),
            self._ends(groups, population, chains),
            torch.stack(laws, dim=2) if groups.extent.verifies else None,
        )

    def score(
        self, groups: Groups, population: Population, drafts: Drafts, slots: torch.Tensor
    ) -> torch.Tensor:
        """One target pass over [last, x_1..x_K]: log p of what comes next, ``[G, N, K + 1, V]``."""
        chain = torch.cat([population.last_tokens.unsqueeze(2), drafts.tokens], dim=2)
        starts, places = self._places(groups, population)
        logits = self.target.chain_logits(chain, starts, slots, places)
        column = torch.arange(chain.shape[2], device=chain.device)
        positions = population.output_lengths.unsqueeze(2) + column  # [G, N, K + 1]
        log_p = groups.settings.log_probs(
            logits.flatten(1, 2),
            positions.flatten(1),
            filtered=groups.extent.filtered,
        )
        return log_p.view(*chain.shape, -1)

    def decide(
        self, groups: Groups, population: Population, drafts: Drafts, log_p: torch.Tensor
    ) -> Decision:
        """Weigh or verify, as each request asked for."""
        if not groups.extent.verifies:
            return self.weigh(groups, population, drafts, log_p)
        verified = self.verify(groups, population, drafts, log_p)
        if not groups.extent.weighs:
            return verified
        weighed = self.weigh(groups, population, drafts, log_p)
        return _choose(groups.settings.weighs, weighed, verified)

    def weigh(
        self, groups: Groups, population: Population, drafts: Drafts, log_p: torch.Tensor
    ) -> Decision:
        """Weigh by log p - log q up to each particle's end; where the ESS is low, resample."""
        is_open = self._open_columns(groups, population, drafts)
        scored = token_log_probs(log_p[:, :, :-1], drafts.tokens).double()
        scored = scored * groups.settings.power.view(-1, 1, 1)
        cut = rounds.cut(
            population.log_weights,
            torch.where(is_open, scored - drafts.log_q, 0.0),
            groups.settings.rules,
            population.present,
            self._coins(groups, population),
        )
        column = torch.arange(is_open.shape[2], device=is_open.device)
        num_kept = (is_open & (column < cut.num_columns.view(-1, 1, 1))).sum(2)
        position = (population.output_lengths + num_kept).amax(1, keepdim=True)
        noise = self._uniforms(groups, position, Purpose.RESAMPLE)
        resampled = _resample(groups, population, cut, noise)
        group = torch.arange(len(groups.reqs), device=log_p.device).unsqueeze(1)
        return Decision(
            cut=cut,
            num_kept=num_kept,
            resampled=resampled,
            next_log_p=log_p[group, resampled.ancestors, cut.num_columns.unsqueeze(1)].double(),
            verified=torch.zeros_like(cut.resample),
        )

    def verify(
        self, groups: Groups, population: Population, drafts: Drafts, log_p: torch.Tensor
    ) -> Decision:
        """Keep the columns that the block's evidence covers, or that exact verification accepts.

        Of the two the longer. All particles go on as one winner: they begin and end such a round
        with one text, which is emitted at once.
        """
        assert drafts.law is not None
        settings, is_open = groups.settings, self._open_columns(groups, population, drafts)
        column = torch.arange(is_open.shape[2], device=is_open.device)
        positions = population.output_lengths.unsqueeze(2) + column  # [G, N, K]
        first = positions[:, :1, 0]  # [G, 1]: all particles have one text
        found = exact.verify(
            drafts.tokens,
            drafts.ends,
            log_p,
            drafts.law,
            self._uniforms(groups, positions, Purpose.ACCEPT),
            num_chains=settings.num_particles,
            num_steps=settings.num_steps,
        )
        block = mixed.judge(
            token_log_probs(log_p[:, :, :-1], drafts.tokens) - drafts.log_q,
            is_open,
            population.present,
            settings.num_steps,
            settings.evidence_threshold,
            self._coins(groups, population),
            self._uniforms(groups, first, Purpose.RESAMPLE)[:, 0],
        )
        kept, by_block = mixed.longer(block, found, log_p, drafts.ends, settings.num_steps)
        # Where nothing is kept by evidence, the chains' weights say nothing of the output.
        ess = torch.where(
            settings.evidence_threshold < torch.inf, block.ess, settings.num_particles
        )
        return _one_lineage(population, kept, ess, by_block)

    def extend(
        self, groups: Groups, population: Population, drafts: Drafts, decision: Decision
    ) -> Population:
        """Append the drafts that are kept, and let ancestors hand down their texts."""
        column = torch.arange(drafts.tokens.shape[2], device=drafts.tokens.device)
        kept = column < decision.num_kept.unsqueeze(2)  # [G, N, K]
        extended = population.append(drafts.tokens, decision.num_kept)._replace(
            ended=population.ended | (drafts.ends & kept).any(2)
        )
        return self._descend(groups, extended, decision.resampled)

    def add_bonus(
        self, groups: Groups, population: Population, next_log_p: torch.Tensor
    ) -> Population:
        """One more token from the target, after resampling, so that copies part at once."""
        live = ~population.ended
        law, log_sum = next_log_p, torch.zeros_like(population.log_weights)
        if groups.extent.powered:
            law, log_sum = power_law(next_log_p, groups.settings.power.unsqueeze(1))
        noise = self._uniforms(groups, population.output_lengths, Purpose.BONUS)
        spread = stratify(noise, self._siblings(groups, population))
        # After verification all particles go on as one, so they draw one token.
        noise = torch.where(groups.settings.weighs.unsqueeze(1), spread, noise[:, :1])
        tokens = sample(law, noise)
        ends = self._ends(groups, population, tokens.unsqueeze(2)).squeeze(2)
        return population.append(tokens.unsqueeze(2), live.long())._replace(
            ended=population.ended | ends,
            log_weights=population.log_weights + torch.where(live, log_sum, 0.0),
        )

    def collapse(self, groups: Groups, population: Population) -> tuple[Population, torch.Tensor]:
        """The final draw where all have ended, and the same step at the lag bound ``[G]``."""
        finished = population.ended.all(1)
        too_far = population.lengths.amax(1) >= self._max_lag
        forced = too_far & ~finished & groups.settings.weighs
        position = population.output_lengths.amax(1, keepdim=True)
        step = rounds.collapse(
            population.log_weights,
            finished | forced,
            population.present,
            self._uniforms(groups, position, Purpose.SELECT)[:, 0],
            groups.settings.heaviest,
        )
        return self._descend(groups, population, step), forced

    def _descend(
        self, groups: Groups, population: Population, step: rounds.Resampled
    ) -> Population:
        self._ledger.descend(
            groups.rows,
            committed=groups.committed,
            ancestors=step.ancestors,
            max_tail=groups.extent.max_tail,
        )
        return population.descend(step.ancestors)._replace(
            log_weights=step.log_weights,
            log_evidence=population.log_evidence + step.log_evidence,
        )

    def _places(self, groups: Groups, population: Population) -> tuple[torch.Tensor, Places]:
        """The position that each particle continues at, ``[G, N]``, and where its KV stands."""
        places = Places(
            rows=groups.rows,
            committed=groups.committed,
            particle_rows=self._ledger.particle_rows(groups.rows, groups.extent.num_particles),
            max_tail=groups.extent.max_tail + 1,
        )
        return groups.committed.unsqueeze(1) + population.lengths, places

    def _siblings(self, groups: Groups, population: Population) -> torch.Tensor:
        """Particles that may share their noise, ``[G, N, N]``: verified chains are independent."""
        itself = torch.eye(groups.extent.num_particles, device=population.ended.device).bool()
        if not groups.extent.weighs:
            return itself.expand(len(groups.reqs), -1, -1)
        anchor = population.anchor
        same = same_text(population.tokens, population.lengths)
        same = same & (anchor.unsqueeze(2) == anchor.unsqueeze(1))
        both = population.present.unsqueeze(2) & population.present.unsqueeze(1)
        return itself | (same & both & groups.settings.weighs.view(-1, 1, 1))

    def _open_columns(self, groups: Groups, population: Population, drafts: Drafts) -> torch.Tensor:
        """The columns up to each particle's end, and within its request's K: ``[G, N, K]``."""
        column = torch.arange(drafts.tokens.shape[2], device=drafts.tokens.device)
        in_block = column < groups.settings.num_steps.view(-1, 1, 1)
        return rounds.still_open(drafts.ends) & in_block & ~population.ended.unsqueeze(2)

    def _ends(self, groups: Groups, population: Population, tokens: torch.Tensor) -> torch.Tensor:
        """Which of the tokens ``[G, N, C]`` that would come next end their text."""
        column = torch.arange(tokens.shape[2], device=tokens.device)
        lengths = population.output_lengths.unsqueeze(2) + column + 1
        ends = groups.settings.ends(tokens.flatten(1), lengths.flatten(1)).view_as(tokens)
        return stopping.mark_stop_texts(ends, groups.reqs, tokens, population)

    def _coins(self, groups: Groups, population: Population) -> torch.Tensor:
        """One uniform a round for what its evidence decides, ``[G]``."""
        start = population.output_lengths.amax(1, keepdim=True)
        return self._uniforms(groups, start, Purpose.KEEP)[:, 0]

    def _uniforms(self, groups: Groups, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """Uniforms for the output positions ``[G, N]``, ``[G, 1]`` or ``[G, N, C]``."""
        columns = (1,) * (positions.dim() - 2)
        particle = torch.arange(groups.extent.num_particles, device=positions.device)
        return uniforms(
            groups.settings.seeds.view(-1, 1, *columns),
            positions,
            particle.view(-1, *columns),
            purpose,
        )


def _resample(
    groups: Groups, population: Population, cut: rounds.Cut, noise: torch.Tensor
) -> rounds.Resampled:
    """Each request by its own method."""
    found = [
        (method, rounds.resample(cut.log_weights, cut.resample, population.present, noise, method))
        for method in sorted(set(filter(None, groups.extent.methods)))
    ]
    chosen = found[0][1]
    for method, resampled in found[1:]:
        mine = torch.tensor([name == method for name in groups.extent.methods])
        chosen = _choose(mine.to(noise.device, non_blocking=True), resampled, chosen)
    return chosen


def _one_lineage(
    population: Population, kept: exact.Verified, ess: torch.Tensor, by_block: torch.Tensor
) -> Decision:
    """All particles become the winner. Their weights stay equal, so nothing is ever banked."""
    num_particles = population.present.shape[1]
    itself = torch.arange(num_particles, device=ess.device)
    never = torch.zeros_like(by_block)
    return Decision(
        cut=rounds.Cut(kept.num_columns, population.log_weights, ess, never, never),
        num_kept=kept.num_columns.unsqueeze(1).where(population.present, 0),
        resampled=rounds.Resampled(
            ancestors=kept.winner.unsqueeze(1).where(population.present, itself),
            log_weights=population.log_weights,
            log_evidence=torch.zeros_like(population.log_evidence),
        ),
        next_log_p=kept.next_probs.log().unsqueeze(1).expand(-1, num_particles, -1),
        verified=~by_block,
    )


def _choose(where: torch.Tensor, yes: Any, no: Any) -> Any:
    """``yes`` or ``no`` for each group, of tensors ``[G, ...]`` or tuples of them."""
    if isinstance(yes, torch.Tensor):
        return torch.where(where.view(-1, *(1,) * (yes.dim() - 1)), yes, no)
    return type(yes)(*(_choose(where, a, b) for a, b in zip(yes, no, strict=True)))
