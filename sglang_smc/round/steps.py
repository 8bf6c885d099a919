"""The steps of a round, each for all particles of all running requests at once.

`round.Round.play` puts them in order. Glossary, with G requests (groups), N particles each, K
drafted tokens a round, V tokens in the vocabulary:

    particle     a request's emitted text and a *tail* of tokens that are not emitted yet
    draft        a token that the draft model proposed, drawn from q
    column       the j-th drafted token of all particles of a request
    weight       p / q, multiplied up since the last resampling, of each particle
    ESS          effective sample size: how many equal weights would say as much
    resampling   heavy particles hand down their texts, light ones go: `ancestors`
    evidence     what a block of drafts multiplies the mean weight by
    bonus        one more token, from the target's own distribution
    narrow       the oldest tokens are drawn by weight, and who has others goes

A round waits for the device only where some request's text obeys rules that read it on the host.
"""

from collections.abc import Sequence
from functools import partial

import torch

from sglang_smc.drafts.proposal import DraftSlots, Proposal
from sglang_smc.memory import arena
from sglang_smc.memory.ledger import Ledger
from sglang_smc.models.attention import KVLocations
from sglang_smc.ops.interface import Ops
from sglang_smc.options.server import SMCConfig
from sglang_smc.recording.passes import Forward, PassRecording
from sglang_smc.recording.recorder import Record
from sglang_smc.requests.failures import failure_of_round
from sglang_smc.requests.state import state_of
from sglang_smc.round.batch import RoundBatch
from sglang_smc.round.decision import Decision, Drafts, no_drafts
from sglang_smc.round.verification import verify
from sglang_smc.round.watch import choose
from sglang_smc.smc import resizing, rounds
from sglang_smc.smc.randomness import Purpose
from sglang_smc.state.logprobs import logprob_distribution
from sglang_smc.state.population import Population
from sglang_smc.tokens.distribution import NextTokens, TokenDistribution


class Steps:
    """Draft, score, decide, extend, bonus and narrow; populations in, populations out.

    Args:
        target: the model, over particles.
        draft: who drafts for it.
        ledger: of their KV slots.
        ops: the small operations.
    """

    def __init__(
        self,
        target: Forward,
        draft: Proposal,
        ledger: Ledger,
        ops: Ops,
    ) -> None:
        self.target = target
        self.draft = draft
        self.ledger = ledger
        self.ops = ops

    def record_passes(
        self, record: Record, config: SMCConfig, sizes: Sequence[int], device: str
    ) -> None:
        """Record the models' passes, and replay them from now on: for rounds that the host plays.

        Not before whole rounds are recorded, which hold no replay of another recording.
        """
        max_tail = arena.max_tail(config) + 1
        recording = PassRecording(record, config.num_particles, sizes, max_tail, device)
        target = recording.of(self.target, "chain_logits", [config.num_steps + 1])
        self.target, self.draft = target, self.draft.recorded(recording)

    def reserve(self, batch: RoundBatch, population: Population) -> DraftSlots:
        """Find the KV slots of the next K + 1 positions of each particle, and of the one before."""
        starts = batch.committed.unsqueeze(1) + population.lengths
        slots = self.ledger.reserve(
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
            particle_rows=self.ledger.particle_rows(batch.rows, batch.shape.num_particles),
            max_tail=batch.shape.max_tail + 1,  # ended ones compute past their last token, too
        )
        slots = slots.permute(2, 0, 1).contiguous()  # each draft step's in one piece
        column = torch.arange(-1, len(slots) - 1, device=starts.device)
        return DraftSlots(slots, starts + column.view(-1, 1, 1), locations)

    def resize(self, batch: RoundBatch, population: Population) -> tuple[Population, torch.Tensor]:
        """Give groups the particles that they run with from now on, if those are more or fewer.

        And say whom each was made of, ``[G, N]``.
        """
        methods = sorted({state_of(req).config.resampling_method for req in batch.reqs})
        step = rounds.by_method(
            batch.settings.scheme,
            methods,
            partial(
                resizing.resize,
                population.log_weights,
                population.present,
                batch.settings.num_particles,
                self.ops.uniforms(batch.settings.seeds, batch.furthest, Purpose.RESIZE),
            ),
        )
        # The draft may have yet to read the last emitted token, through the particle's own row.
        self.ledger.descend(
            batch.rows,
            committed=batch.committed - 1,
            ancestors=step.ancestors,
            max_tail=batch.shape.max_tail,
        )
        resized = population.resize(step.ancestors, step.present)._replace(
            log_weights=step.log_weights,
            log_evidence=population.log_evidence + step.log_evidence,
        )
        return resized, step.ancestors

    def propose(self, batch: RoundBatch, population: Population, slots: DraftSlots) -> Drafts:
        """Draft x_1..x_K ~ q, one after another, from each particle's last token."""
        num_steps, settings = batch.shape.num_steps, batch.settings
        logits = self.draft.begin(batch.last_two, slots)  # [G, N, V]
        if num_steps == 0:
            return no_drafts(population)
        # [G, N, K], each step's in one piece
        positions = (batch.starts + batch.column.view(-1, 1, 1)).permute(1, 2, 0)
        texts = population.texts[:, :, 1:]
        same_text = self.ops.same_text(texts, population.lengths, batch.may_stratify)
        numbers = self.ops.uniforms(settings.seeds, positions, Purpose.DRAFT)
        numbers = numbers.permute(2, 0, 1).contiguous()  # [K, G, N]
        watchable, matches = choose(self.ops, batch), batch.matches
        held: torch.Tensor | None = None
        tokens: torch.Tensor | None = None
        drawn: list[torch.Tensor] = []
        log_q: list[torch.Tensor] = []
        distributions: list[TokenDistribution] = []
        for step in range(num_steps):
            at_step, same_text = self.ops.stratify(numbers[step], same_text, tokens)
            if tokens is not None:
                logits = self.draft.go_on(step, tokens, slots)
                matches = None if matches is None else matches.follow(tokens)
            q = self._q(batch, logits, drawn)
            q = q if matches is None else matches.mixed(self.ops, q)
            tokens, log_q_of_tokens = q.sample(self.ops, at_step)
            drawn.append(tokens)
            log_q.append(log_q_of_tokens)
            distributions.append(q)
            held = self.ops.keep_column(held, q.scores, watchable, step)
        chains = torch.stack(drawn, dim=2)  # [G, N, K]
        ends = self._ends(batch, population, positions, chains)
        num_columns = torch.where(population.ended, 0, settings.num_steps.unsqueeze(1))  # [G, N]
        return Drafts(
            chains,
            torch.stack(log_q, dim=2),
            ends,
            still_open(ends) & (batch.column < num_columns.unsqueeze(2)),
            distributions if batch.shape.verifies else None,
            watchable,
            held,
        )

    def _q(
        self,
        batch: RoundBatch,
        logits: torch.Tensor,
        drawn: list[torch.Tensor],
    ) -> TokenDistribution:
        """q after the tokens ``[G, N]`` that have been ``drawn``, from ``logits`` ``[G, N, V]``."""
        allowed = None
        if batch.edits is not None or batch.shape.has_rules:
            nothing = batch.starts.new_empty(*batch.starts.shape, 0)  # [G, N, 0]
            chains = torch.stack(drawn, dim=2) if drawn else nothing
            edited, allowed = self._edited(batch, logits.unsqueeze(2), chains, len(drawn))
            logits = edited.squeeze(2)
            allowed = allowed if allowed is None else allowed.squeeze(2)
        q = TokenDistribution.of(self.ops, logits, batch.q_rules, batch.shape.kinds, allowed)
        return q.summed(self.ops)

    def score(
        self, batch: RoundBatch, drafts: Drafts, slots: DraftSlots
    ) -> tuple[TokenDistribution, TokenDistribution | None]:
        """One target pass over [last, x_1..x_K]: p of what comes next, for G * N * (K + 1) rows.

        And what log-probabilities are taken from, where some request wants them.
        """
        last = batch.last_two[:, :, 1:]
        # Behind an end nothing is read that could break the columns before it: 0 * NaN is NaN.
        read = torch.where(drafts.before_end, drafts.tokens, last)
        chain = torch.cat([last, read], dim=2)  # [G, N, K + 1]
        where = slots.slots[1:].permute(1, 2, 0)
        logits = self.target.chain_logits(chain, slots.positions[1], where, slots.locations)
        logits, allowed = self._edited(batch, logits, drafts.tokens, 0)  # [G, N, K + 1, V]
        allowed = allowed if allowed is None else allowed.flatten(1, 2)
        logits = logits.flatten(1, 2)
        p = TokenDistribution.of(self.ops, logits, batch.p_rules, batch.shape.kinds, allowed)
        p = p.summed(self.ops)
        if not batch.shape.logprobs.own:
            return p, None
        return p, logprob_distribution(logits, batch.p_rules.temperature, allowed)

    def _edited(
        self, batch: RoundBatch, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits as requests change them, and what their rules allow; see `TextRule.edit`."""
        if batch.edits is not None:
            self.ops.edit_logits(logits, batch.edits, chains, first)
        if not batch.shape.has_rules:
            return logits, None
        return batch.rules.apply(logits, chains, first)

    def judge(self, batch: RoundBatch, population: Population) -> Population:
        """Weigh the texts that the round starts from by what the host says of them by now.

        Waits for potentials where it has to.
        """
        if population.judged is None:
            return population
        return population.judge(batch.rules.judged(batch.reqs, batch.starts))

    def decide(
        self, batch: RoundBatch, population: Population, drafts: Drafts, p: TokenDistribution
    ) -> Decision:
        """Weigh or verify, as each request asked for."""
        shape = batch.shape
        # The last column has no drafted token to score: any will do.
        tokens = torch.nn.functional.pad(drafts.tokens, (0, 1))  # [G, N, K + 1]
        log_p = p._replace(log_mass=None).score(self.ops, tokens)
        of_drafts = log_p, drafts.log_q, drafts.before_end, drafts.ends
        failure = failure_of_round(*of_drafts, ~population.ended)
        if not shape.verifies or shape.num_steps == 0:  # then the target draws the next token
            return self._weigh(batch, population, drafts, p, log_p, failure)
        verified = verify(batch, population, drafts, p, log_p, failure, self.ops)
        if not shape.weighs:
            return verified
        weighed = self._weigh(batch, population, drafts, p, log_p, failure)
        return verified.unless(batch.settings.weighs, weighed)

    def _weigh(
        self,
        batch: RoundBatch,
        population: Population,
        drafts: Drafts,
        p: TokenDistribution,
        log_p: torch.Tensor,
        failure: torch.Tensor,
    ) -> Decision:
        """Weigh by log p - log q up to each particle's end; where the ESS is low, resample.

        Args:
            p, log_p: ``[G, N, K + 1]`` the law, and the drafted tokens under it.
            failure: ``[G]`` int64 `Failure`.
        """
        settings, numbers = batch.settings, partial(self.ops.uniforms, batch.settings.seeds)
        log_mass = None if p.log_mass is None else p.log_mass.view_as(log_p)  # [G, N, K + 1]
        if log_mass is not None:
            log_p = log_p + log_mass
        own = self.ops.reweight_and_resample  # kernels want a column to work on
        cut, num_kept, resampled = (own if batch.shape.num_steps else rounds.reweight_and_resample)(
            population.log_weights,
            log_p[:, :, :-1],
            drafts.log_q,
            drafts.before_end,
            settings.power,
            _weight_rules(batch, population),
            population.present,
            numbers(batch.furthest[:, :1], Purpose.KEEP)[:, 0],
            numbers(batch.furthest, Purpose.RESAMPLE),
            settings.scheme,
            batch.shape.methods,
        )
        # The rows of p are [G, N, K + 1]: of each particle that of its ancestor's next token.
        first = torch.arange(0, log_p.numel(), log_p[0].numel(), device=log_p.device)  # [G]
        next_row = (first + cut.num_columns).unsqueeze(1)
        row = torch.add(next_row, resampled.ancestors, alpha=log_p.shape[2]).flatten()  # [G * N]
        masses = None if log_mass is None else log_mass.flatten()[row].view_as(resampled.ancestors)
        return Decision(
            cut,
            num_kept,
            resampled,
            NextTokens(p._replace(rows=row, log_mass=None), masses),
            verified=~settings.weighs,
            failure=failure,
        )

    def extend(
        self, batch: RoundBatch, population: Population, drafts: Drafts, decision: Decision
    ) -> Population:
        """Append the drafts that are kept, and let ancestors hand down their texts."""
        num_steps = batch.shape.num_steps
        kept = batch.column < decision.num_kept.unsqueeze(2)  # [G, N, K]
        ended = population.ended | (drafts.ends & kept).any(2)
        # The draft has read all but the last that it drafted itself, if it drafted any.
        unread = decision.cut.num_columns == (num_steps or -1)
        resampled = decision.resampled
        self.ledger.descend(
            batch.rows,
            committed=batch.committed,
            ancestors=resampled.ancestors,
            max_tail=batch.shape.max_tail,
        )
        extended = population.append(drafts.tokens, decision.num_kept)
        return extended._replace(ended=ended, unread=unread).hand_down(resampled)

    def add_bonus(
        self, batch: RoundBatch, population: Population, next_tokens: NextTokens
    ) -> Population:
        """One more token from the target, after resampling, so that copies part at once."""
        if batch.shape.powered or next_tokens.log_masses is not None:
            next_tokens, population = self._weigh_bonus(batch, population, next_tokens)
        settings, positions = batch.settings, population.output_lengths
        texts = population.texts[:, :, 1:]
        same_text = self.ops.same_text(texts, population.lengths, batch.may_stratify)
        own = self.ops.uniforms(settings.seeds, positions, Purpose.BONUS)
        numbers, _ = self.ops.stratify(own, same_text)
        if batch.shape.verifies:
            # After verification all particles go on as one, so they draw one token.
            numbers = torch.where(settings.weighs.unsqueeze(1), numbers, own[:, :1])
        tokens = next_tokens.sample(self.ops, numbers).unsqueeze(2)  # [G, N, 1]
        ends = self._ends(batch, population, positions.unsqueeze(2), tokens).squeeze(2)
        extended = population.append(tokens, ~population.ended)
        return extended._replace(ended=population.ended | ends)

    def _weigh_bonus(
        self, batch: RoundBatch, population: Population, next_tokens: NextTokens
    ) -> tuple[NextTokens, Population]:
        """Raise the bonus token's law to each power, and weigh by the mass of what may come."""
        weighs, masses = batch.settings.weighs.unsqueeze(1), next_tokens.log_masses
        log_sum = torch.zeros_like(population.log_weights) if masses is None else masses.double()
        if batch.shape.powered:
            powers = batch.settings.power.unsqueeze(1)  # [G, 1]
            of_draws = powers.expand_as(log_sum).flatten()
            law, raised = next_tokens.law.to_power(self.ops, of_draws)
            next_tokens = next_tokens._replace(law=law)
            log_sum = torch.addcmul(raised.view_as(log_sum), powers, log_sum)
        counts = weighs & ~population.ended
        stuck = (~weighs & (log_sum == -torch.inf)).any(1)
        return next_tokens, population._replace(
            log_weights=population.log_weights + torch.where(counts, log_sum, 0.0),
            # Verified texts have no weight; this says that no token may follow one.
            log_evidence=population.log_evidence.masked_fill(stuck, -torch.inf),
        )

    def narrow(
        self, batch: RoundBatch, population: Population
    ) -> tuple[Population, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Settle what lags too far behind, and the whole text of groups that have ended.

        Returns:
            The population, of whom each is a copy, ``[G, N]``, where particles went for the lag's
            sake, ``[G]`` bool, and log Z-hat ``[G]`` with what weights have gained since some was
            banked: a retraction keeps both.
        """
        settings, longest = batch.settings, population.lengths.amax(1)
        finished = population.is_finished()
        # Who is judged may have nothing but a first token of his own: of these one is drawn, too.
        whole = longest if population.judged is None else longest.clamp_min(1)
        late = (longest + 1 - settings.lag).clamp_min(0) * settings.weighs
        furthest = (population.num_emitted + longest).unsqueeze(1)  # [G, 1]
        step = self.ops.narrow(
            population.log_weights,
            population.texts[:, :, 1:],  # with the token before each
            population.lengths,
            torch.where(finished, whole, late),
            population.present,
            self.ops.uniforms(settings.seeds, furthest, Purpose.SELECT)[:, 0],
            settings.heaviest,
        )
        self.ledger.descend(
            batch.rows,
            committed=batch.committed,
            ancestors=step.ancestors,
            max_tail=batch.shape.max_tail,
        )
        narrowed = population.descend(step.ancestors)._replace(log_weights=step.log_weights)
        by_lag = (step.num_dropped > 0) & ~finished
        return narrowed, step.ancestors, by_lag, population.log_evidence + step.log_mean

    def _ends(
        self,
        batch: RoundBatch,
        population: Population,
        positions: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Which of the tokens ``[G, N, C]`` at ``positions`` of the output end their text."""
        ends = batch.settings.ends(tokens, positions)
        return batch.rules.ends(ends, tokens, population) if batch.shape.has_rules else ends


def _weight_rules(batch: RoundBatch, population: Population) -> rounds.WeightRules:
    settings = batch.settings
    num_steps, threshold = settings.num_steps, settings.ess_threshold
    if population.judged is not None:
        # Who has but waited to be judged has drafted nothing, and is drawn from as he is.
        waited = population.ended.all(1)
        num_steps = num_steps.masked_fill(waited, 0)
        threshold = threshold.masked_fill(waited, 0.0)
    return rounds.WeightRules(num_steps, threshold, settings.at_token, settings.evidence_threshold)


def still_open(ends: torch.Tensor) -> torch.Tensor:
    """Which columns still lie open: ``[..., K]`` ends to ``[..., K]`` "none before this one"."""
    return ends.cumsum(-1) == ends
