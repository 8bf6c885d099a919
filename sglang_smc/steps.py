"""The steps of a round, each for all particles of all running requests at once.

`worker.SMCWorker._round` puts them in order. They wait for the device in two places only:
where the forwards tell attention backends the lengths, and for requests that stop at a
string.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_smc import stopping
from sglang_smc.config import SMCConfig
from sglang_smc.forward import ParticleForward
from sglang_smc.ledger import Ledger
from sglang_smc.particles import Population
from sglang_smc.sampling import Settings
from sglang_smc.smc import exact, rounds
from sglang_smc.smc.proposal import sample, token_log_probs
from sglang_smc.smc.randomness import Purpose, uniforms

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Groups(NamedTuple):
    """The requests of one round: who they are, what they asked for, what they own."""

    reqs: "list[Req]"
    rows: torch.Tensor  # [G] in req_to_token_pool
    settings: Settings
    filtered: bool  # some request uses top-k, top-p or min-p
    committed: torch.Tensor  # [G] KV slots of the emitted text
    allocated: torch.Tensor  # [G] KV slots owned


class Drafts(NamedTuple):
    """What the draft proposed, and with what probability."""

    tokens: torch.Tensor  # [G, N, K]
    log_q: torch.Tensor  # [G, N, K] of these tokens; in exact mode [G, N, K, V], of all


class Steps:
    """Draft, score, reweight, resample, bonus and collapse; populations in, populations out."""

    def __init__(
        self, config: SMCConfig, target: ParticleForward, draft: ParticleForward, ledger: Ledger
    ) -> None:
        self.config = config
        self.target = target
        self.draft = draft
        self._ledger = ledger

    def reserve(self, groups: Groups, population: Population) -> torch.Tensor:
        """Free KV slots for the next K + 1 positions of each particle, ``[G, N, K + 1]``."""
        return self._ledger.reserve(
            groups.rows,
            allocated=groups.allocated,
            starts=groups.committed.unsqueeze(1) + population.lengths,
            idle=population.ended,
            num_columns=self.config.num_steps + 1,
        )

    def propose(self, groups: Groups, population: Population, slots: torch.Tensor) -> Drafts:
        """Draft x_1..x_K ~ q, one after another, from each particle's last token."""
        rows = self._ledger.particle_rows(groups.rows).flatten()  # [G * N]
        starts = (groups.committed.unsqueeze(1) + population.lengths).flatten()
        tokens, drawn, log_q = population.last_tokens, [], []
        keep_all = self.config.mode == "exact"
        for step in range(self.config.num_steps):
            logits = self.draft.decode(
                tokens.flatten(), rows, starts + step, slots[..., step].flatten()
            )
            positions = population.output_lengths + step
            log_probs = groups.settings.log_probs(
                logits.view(*tokens.shape, -1), positions, filtered=groups.filtered
            )
            tokens = sample(log_probs, self._uniforms(groups, positions, Purpose.DRAFT))
            drawn.append(tokens)
            log_q.append(log_probs if keep_all else token_log_probs(log_probs, tokens))
        # The last drafted token's KV, which the next round's draft reads if the token is kept.
        last = self.config.num_steps
        self.draft.decode(tokens.flatten(), rows, starts + last, slots[..., last].flatten())
        return Drafts(torch.stack(drawn, dim=2), torch.stack(log_q, dim=2))

    def score(
        self, groups: Groups, population: Population, drafts: Drafts, slots: torch.Tensor
    ) -> torch.Tensor:
        """One target pass over [last, x_1..x_K]: log p of what comes next, ``[G, N, K + 1, V]``."""
        chain = torch.cat([population.last_tokens.unsqueeze(2), drafts.tokens], dim=2)
        starts = groups.committed.unsqueeze(1) + population.lengths
        logits = self.target.verify(
            chain.flatten(0, 1),
            self._ledger.particle_rows(groups.rows).flatten(),
            starts.flatten(),
            slots.flatten(0, 1),
        )
        column = torch.arange(chain.shape[2], device=chain.device)
        positions = population.output_lengths.unsqueeze(2) + column  # [G, N, K + 1]
        log_p = groups.settings.log_probs(
            logits.view(len(groups.reqs), -1, logits.shape[-1]),
            positions.flatten(1),
            filtered=groups.filtered,
        )
        return log_p.view(*chain.shape, -1)

    def reweight(
        self, groups: Groups, population: Population, drafts: Drafts, log_p: torch.Tensor
    ) -> tuple[rounds.Cut, Population]:
        """Weigh by log p - log q up to each particle's end, and choose the columns to keep."""
        ends = self._ends(groups, population, drafts.tokens)
        is_open = rounds.still_open(ends) & ~population.ended.unsqueeze(2)  # [G, N, K]
        scored = token_log_probs(log_p[:, :, :-1], drafts.tokens)
        cut = rounds.cut(
            population.log_weights,
            torch.where(is_open, scored - drafts.log_q, 0.0),
            ess_threshold=self.config.ess_threshold,
            resample_at=self.config.resample_at,
        )
        column = torch.arange(self.config.num_steps, device=ends.device)
        kept = is_open & (column < cut.num_columns.view(-1, 1, 1))
        extended = population.append(drafts.tokens, kept.sum(2))._replace(
            ended=population.ended | (ends & kept).any(2), log_weights=cut.log_weights
        )
        return cut, extended

    def resample(
        self, groups: Groups, population: Population, cut: rounds.Cut
    ) -> tuple[torch.Tensor, Population]:
        """Where the ESS is low, draw ancestors ``[G, N]`` and exchange pointers."""
        position = population.output_lengths.amax(1, keepdim=True)
        step = rounds.resample(
            population.log_weights,
            cut.resample,
            self._uniforms(groups, position, Purpose.RESAMPLE),
            self.config.resampling_method,
        )
        return step.ancestors, self._descend(groups, population, step)

    def add_bonus(
        self,
        groups: Groups,
        population: Population,
        log_p: torch.Tensor,
        ancestors: torch.Tensor,
        num_columns: torch.Tensor,
    ) -> Population:
        """One more token from the target, after resampling, so that copies part at once."""
        group = torch.arange(len(groups.reqs), device=log_p.device).unsqueeze(1)
        positions = population.output_lengths
        tokens = sample(
            log_p[group, ancestors, num_columns.unsqueeze(1)],  # [G, N, V]
            self._uniforms(groups, positions, Purpose.BONUS),
        )
        return self._append_live(groups, population, tokens)

    def verify(
        self, groups: Groups, population: Population, drafts: Drafts, log_p: torch.Tensor
    ) -> tuple[rounds.Cut, Population]:
        """Exact mode: accept what follows p, and let all particles go on as the winner.

        They begin and end such a round with one text, so it is emitted at once.
        """
        column = torch.arange(self.config.num_steps, device=log_p.device)
        positions = population.output_lengths.unsqueeze(2) + column  # [G, N, K]
        ends = self._ends(groups, population, drafts.tokens)
        found = exact.verify(
            drafts.tokens,
            ends,
            log_p,
            drafts.log_q,
            self._uniforms(groups, positions, Purpose.ACCEPT),
        )
        counts = found.num_columns.unsqueeze(1).expand_as(population.lengths)
        extended = population.append(drafts.tokens, counts)._replace(
            ended=(ends & (column < counts.unsqueeze(2))).any(2)
        )
        winners = found.winner.unsqueeze(1).expand_as(counts)
        # Weights stay equal, so that nothing is banked and no ESS is ever low.
        unweighed = torch.zeros_like(population.log_evidence)
        won = self._descend(
            groups, extended, rounds.Resampled(winners, population.log_weights, unweighed)
        )
        last = won.output_lengths[:, :1]
        token = sample(found.next_probs.log(), self._uniforms(groups, last, Purpose.BONUS)[:, 0])
        never = torch.zeros_like(population.ended[:, 0])
        cut = rounds.Cut(
            num_columns=found.num_columns,
            log_weights=population.log_weights,
            ess=torch.full_like(unweighed, self.config.num_particles),
            resample=never,
            all_zero=never,
        )
        return cut, self._append_live(groups, won, token.unsqueeze(1).expand_as(counts))

    def collapse(self, groups: Groups, population: Population) -> tuple[Population, torch.Tensor]:
        """The final draw where all have ended, and the same step at the lag bound ``[G]``."""
        finished = population.ended.all(1)
        forced = (population.lengths.amax(1) >= self.config.max_lag) & ~finished
        step = rounds.collapse(
            population.log_weights,
            finished | forced,
            self._uniforms(groups, population.output_lengths.amax(1, keepdim=True), Purpose.SELECT)[
                :, 0
            ],
            self.config.selection,
        )
        return self._descend(groups, population, step), forced

    def _descend(
        self, groups: Groups, population: Population, step: rounds.Resampled
    ) -> Population:
        self._ledger.descend(groups.rows, groups.committed, step.ancestors)
        return population.descend(step.ancestors)._replace(
            log_weights=step.log_weights,
            log_evidence=population.log_evidence + step.log_evidence,
        )

    def _append_live(
        self, groups: Groups, population: Population, tokens: torch.Tensor
    ) -> Population:
        """Append one token ``[G, N]`` to each particle that has not ended."""
        live = ~population.ended
        ends = self._ends(groups, population, tokens.unsqueeze(2)).squeeze(2)
        return population.append(tokens.unsqueeze(2), live.long())._replace(
            ended=population.ended | (live & ends)
        )

    def _ends(self, groups: Groups, population: Population, tokens: torch.Tensor) -> torch.Tensor:
        """Which of the tokens ``[G, N, C]`` that would come next end their text."""
        column = torch.arange(tokens.shape[2], device=tokens.device)
        lengths = population.output_lengths.unsqueeze(2) + column + 1
        ends = groups.settings.ends(tokens.flatten(1), lengths.flatten(1)).view_as(tokens)
        return stopping.mark_stop_texts(ends, groups.reqs, population, tokens)

    def _uniforms(self, groups: Groups, positions: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """Uniforms for the output positions ``[G, N]``, ``[G, 1]`` or ``[G, N, C]``."""
        columns = (1,) * (positions.dim() - 2)
        particle = torch.arange(self.config.num_particles, device=positions.device)
        return uniforms(
            groups.settings.seeds.view(-1, 1, *columns),
            positions,
            particle.view(-1, *columns),
            purpose,
        )
