"""Play one round of SMC speculative decoding for all particles of all running requests.

`Round.play` lists the steps, which are methods of `Steps`; docs/algorithm.md explains them.
Glossary, with G requests (groups), N particles each, K draft tokens per round, V tokens in the
vocabulary:

    particle     a request's emitted tokens and a *tail* of tokens that are not emitted yet
    draft token  a token that is drawn from q
    column       the j-th draft token of all particles of a request
    weight       product of p / q since the last resampling, of each particle
    ESS          effective sample size: the number of equal weights with the same variance
    resampling   heavy particles are copied, light ones dropped: `ancestors`
    evidence     the factor by which a block of draft tokens multiplies the mean weight
    bonus token  one more token, from p, or after a rejection from the residual distribution
    narrow       draw the oldest tokens of tails by weight, and drop particles with others

The host waits for the device only where some request's rules read its sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.kv import arena
from sglang_smc.kv.transfer import joined
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.recorder import PassRecording, Record
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.base import DraftProposer, DraftSlots
from sglang_smc.proposers.ngram import Corpus, Matches
from sglang_smc.round.batch import Need, RoundBatch, RoundInputs, RoundShape, Tables
from sglang_smc.round.observers import Stages
from sglang_smc.round.plain import play_plainly
from sglang_smc.round.result import Outcome, shown_particles
from sglang_smc.rules.registry import TextRules
from sglang_smc.smc import deciding, weighing
from sglang_smc.smc.deciding import Decided, Drafts, no_drafts
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.fidelity import Path
from sglang_smc.smc.ledger import Arenas, KVLocations, Ledger, Wanted
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Narrowed, Population
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.round import weigh_bonus
from sglang_smc.smc.trees import begin_trees
from sglang_smc.smc.weighing import Block, Decision
from sglang_smc.state.failures import failure_of_round
from sglang_smc.state.logprobs import logprob_distribution
from sglang_smc.state.request import state_of
from sglang_smc.state.settings import Settings


@dataclass(eq=False)
class Steps:
    """Steps of a round, in order, from `reserve` to `narrow`.

    `decide` draws ancestors, which `extend` copies. No population is changed in place.
    """

    target: ParticleForward  # the target model, over particles
    draft: DraftProposer
    ledger: Ledger  # of the particles' KV slots
    ops: Ops  # the small operations
    routed: torch.Tensor | None = None  # `upstream.experts_of_passes`

    def record_passes(
        self, record: Record, config: SMCConfig, sizes: Sequence[int], device: str
    ) -> None:
        """Capture the models' passes, and replay them from now on, in rounds without a graph.

        Call it after whole rounds are captured, since a graph must not contain another's replay.
        """
        max_tail = arena.max_tail(config) + 1
        recording = PassRecording(record, config.num_particles, sizes, max_tail, device)
        if self.routed is None:  # a replay leaves experts in the order of its own, larger shape
            self.target = recording.of(self.target, "chain_logits", [config.num_steps + 1])
        self.draft = self.draft.recorded(recording)

    def reserve(self, batch: RoundBatch, population: Population) -> DraftSlots:
        """Return the KV slots of each particle's next K + 1 positions, and of the one before."""
        wanted = Wanted(
            rows=batch.rows,
            committed=batch.committed,
            allocated=batch.allocated,
            lengths=population.lengths,
            idle=population.ended,
            unread=population.unread,
            num_particles=batch.settings.num_particles,
            num_steps=batch.settings.num_steps,
        )
        slots, positions, rows = self.ledger.reserve(wanted, batch.shape.num_steps + 1)
        longest = batch.shape.max_tail + 1  # ended particles compute past their last token, too
        return DraftSlots(slots, positions, KVLocations(batch.rows, batch.committed, rows, longest))

    def resize(self, batch: RoundBatch, population: Population) -> tuple[Population, torch.Tensor]:
        """Resample each group that changes its number of particles to the new number.

        Returns:
            The population, and the ancestor of each particle, ``[G, N]``.
        """
        settings, present = batch.settings, population.present
        place = torch.arange(present.shape[1], device=present.device)
        ancestors, log_weights, log_evidence = weighing.resample(
            population.log_weights,
            present.sum(1) != settings.num_particles,
            present,
            self.ops.uniforms(settings.seeds, batch.position, Purpose.RESIZE),
            settings.scheme,
            after=place < settings.num_particles.unsqueeze(1),
        )
        # The draft may have yet to read the last token with KV, in the particle's row: `unread`.
        self.ledger.descend(batch.rows, batch.committed - 1, ancestors, batch.shape.max_tail)
        resampled = population.resample(ancestors, log_weights, log_evidence)
        return resampled.resize(settings.num_particles), ancestors

    def propose(self, batch: RoundBatch, population: Population, slots: DraftSlots) -> Drafts:
        """Draft x_1..x_K ~ q, one after another, after each particle's last token."""
        settings, needs = batch.settings, batch.shape.needs
        is_tree = settings.branches if Need.TREES in needs else None
        # Trees draft more than the likeliest token.
        greedy = settings.greedy if is_tree is None else settings.greedy ^ is_tree
        distribution = self._distribution(batch, settings.draft_temperature, greedy)
        texts, equal, tree = population.texts[:, :, 1:], None, None
        if self.shares_slots:
            equal = self.ops.same_text(texts, population.lengths, ~population.ended)
            equal = self.ledger.share(batch.rows, slots.positions[1], slots.slots[1], equal)
        if batch.shape.num_steps == 0:
            if not (batch.shape.skips_draft and self.draft.defers_reading):
                self.draft.read_without_logits(batch.last_two, slots)
            return no_drafts(population)
        if is_tree is not None:
            ahead = settings.num_steps - 1 - batch.column.unsqueeze(1)  # [K, G]
            tree = begin_trees(is_tree, ahead, population.ended, prunes=self.target.merges)
        logits = self.draft.first_logits(batch.last_two, slots)  # [G, N, V]
        # [G, N, K], contiguous for each step
        positions = (batch.output_lengths + batch.column.view(-1, 1, 1)).permute(1, 2, 0)
        same_text = self.ops.same_text(texts, population.lengths, batch.may_stratify)
        if Need.CHAINS in needs:  # those of one particle are independent
            same_text = settings.of_same_chain(same_text)
        uniforms = self.ops.uniforms(settings.seeds, positions, Purpose.DRAFT)
        uniforms = uniforms.permute(2, 0, 1).contiguous()  # [K, G, N]
        coins = self.ops.uniforms(settings.seeds, batch.position[:, :1], Purpose.WATCH)[:, 0]
        matches, tokens = batch.matches, None
        drawn: list[torch.Tensor] = []
        log_q: list[torch.Tensor] = []
        each_q: list[TokenDistribution] = []
        is_edited = needs & {Need.EDITS, Need.RULES}
        q_of = partial(self._edited_q, batch, drawn, distribution) if is_edited else distribution
        for step in range(batch.shape.num_steps):
            stratified, same_text = self.ops.stratify(uniforms[step], same_text, tokens)
            if tokens is not None:
                logits = self.draft.next_logits(step, tokens, slots)
                matches = None if matches is None else matches.follow(tokens)
            q = q_of(logits, slots=None if equal is None else slots.slots[step + 1])
            q = q if matches is None else matches.mixed(q)
            tokens, scored = q.sample(stratified)
            if tree is not None:
                tokens, scored, equal = tree.grow(step, q, tokens, same_text, equal)
            if equal is not None:
                place = slots.positions[step + 2]
                equal = self.ledger.share(batch.rows, place, slots.slots[step + 2], equal, tokens)
            drawn.append(tokens)
            log_q.append(scored)
            each_q.append(q)
        measured = self.ops.keep_column(each_q, coins, settings.num_steps)
        if matches is None:
            measured_q = distribution(measured.unflatten(0, same_text.shape[:2]))
        else:  # these scores are log q itself
            measured_q = self.ops.distribution.of_log_probs(measured, num_groups=len(batch.rows))
        chains = torch.stack(drawn, dim=2)  # [G, N, K]
        ends = settings.ends(chains, positions)
        if Need.RULES in needs:
            ends = batch.rules.ends(ends, chains, population)
        num_columns = torch.where(population.ended, 0, settings.num_steps.unsqueeze(1))  # [G, N]
        return Drafts(
            tokens=chains,
            log_q=torch.stack(log_q, dim=2),
            ends=ends,
            up_to_end=(ends.cumsum(2) == ends) & (batch.column < num_columns.unsqueeze(2)),
            q=each_q if needs & {Need.VERIFIES, Need.EXTENDS} else None,
            coins=coins,
            measured_q=measured_q,
        )

    @property
    def shares_slots(self) -> bool:
        """Return whether particles of one text share KV slots, for which models run once."""
        return self.ops.kind == "torch"

    def _edited_q(
        self,
        batch: RoundBatch,
        drawn: list[torch.Tensor],
        q_of: Callable[..., TokenDistribution],
        logits: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> TokenDistribution:
        """Return q of logits ``[G, N, V]`` after the ``drawn`` tokens, `_edited` and masked."""
        nothing = batch.output_lengths.new_empty((*batch.output_lengths.shape, 0))  # [G, N, 0]
        chains = torch.stack(drawn, dim=2) if drawn else nothing
        edited, allowed = self._edited(batch, logits.unsqueeze(2), chains, len(drawn))
        return q_of(edited, allowed=allowed, slots=slots)

    def _distribution(
        self, batch: RoundBatch, temperature: torch.Tensor, greedy: torch.Tensor
    ) -> Callable[..., TokenDistribution]:
        """Return `TokenDistribution.of` for logits of p or q; ``greedy`` groups have points."""
        needs = batch.shape.needs
        return partial(
            self.ops.distribution.of,
            temperature=temperature,
            greedy=greedy if Need.GREEDY in needs else None,
            filters=batch.settings.filters if Need.FILTERS in needs else None,
        )

    def score(
        self, batch: RoundBatch, drafts: Drafts, slots: DraftSlots
    ) -> tuple[TokenDistribution, torch.Tensor, TokenDistribution | None]:
        """Run one target pass over [last, x_1..x_K] of each particle.

        Returns:
            p of the next token, of G * N * (K + 1) rows; log p of the draft tokens,
            renormalised under masks, ``[G, N, K + 1]``, where the last column is that of token 0,
            to find a NaN; and the distribution of the reported log-probabilities, or None where no
            request returns them.
        """
        last = batch.last_two[:, :, 1:]
        # Tokens after an end are replaced: a NaN there would spread to earlier columns (0 * NaN).
        read = torch.where(drafts.up_to_end, drafts.tokens, last)
        chain = torch.cat([last, read], dim=2)  # [G, N, K + 1]
        written = slots.slots[1:].permute(1, 2, 0)  # [G, N, K + 1]
        chains = Chains(chain, slots.positions[1], written, slots.locations, batch.reqs)
        logits = self.target.chain_logits(chains)  # [G, N, K + 1, V]
        logits, allowed = self._edited(batch, logits, drafts.tokens, 0)
        temperature, shared = batch.settings.temperature, written if self.shares_slots else None
        distribution = self._distribution(batch, temperature, batch.settings.greedy)
        p = distribution(logits, allowed=allowed, slots=shared)
        tokens = torch.nn.functional.pad(drafts.tokens, (0, 1))  # [G, N, K + 1]
        log_p = p.score(tokens)
        kind, is_shown = self.ops.distribution, batch.shape.logprobs.own
        shown = logprob_distribution(kind, logits, temperature, allowed) if is_shown else None
        return p, log_p, shown

    def experts(self, slots: DraftSlots) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the KV slots that `score` has written, and the experts of these tokens."""
        assert self.routed is not None, "asked where SGLang keeps experts"
        written = slots.slots[1:].permute(1, 2, 0)  # [G, N, K + 1]
        return written, self.target.of_tokens(self.routed, written)

    def _edited(
        self, batch: RoundBatch, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Edit logits, and return them with the mask of the requests' rules; see `rules.base`."""
        if batch.edits is not None:
            self.ops.edit_logits(logits, batch.edits, chains, first)
        has_rules = Need.RULES in batch.shape.needs
        return batch.rules.apply(logits, chains, first) if has_rules else (logits, None)

    def decide(
        self,
        batch: RoundBatch,
        population: Population,
        drafts: Drafts,
        p: TokenDistribution,
        log_p: torch.Tensor,
    ) -> Decided:
        """Weigh or verify the draft tokens, by each request's mode; p and log p are of `score`."""
        shape, settings = batch.shape, batch.settings
        if population.scores is not None:
            settings = settings.without_steps(population.ended.all(1))
        uniforms = partial(self.ops.uniforms, settings.seeds)
        block = Block(
            log_weights=population.log_weights,
            log_p=log_p[:, :, :-1],
            log_q=drafts.log_q,
            up_to_end=drafts.up_to_end,
            present=population.present,
            power=settings.power,
            num_steps=settings.num_steps,
            ess_threshold=settings.ess_threshold,
            resample_each_token=settings.resample_each_token,
            evidence_threshold=settings.evidence_threshold,
            scheme=settings.scheme,
            keep_uniforms=uniforms(batch.position[:, :1], Purpose.KEEP)[:, 0],
            uniforms=uniforms(batch.position, Purpose.RESAMPLE),
        )
        verifies = drafts.q is not None
        scored = deciding.Scored(
            population=population,
            drafts=drafts,
            p=p,
            log_p=log_p,
            block=block,
            weighs=settings.weighs,
            powered=Need.POWER in shape.needs,
            accept_uniforms=uniforms(batch.position, Purpose.ACCEPT) if verifies else None,
            extends=settings.extends if shape.chains else None,
            chains=settings.chains if len(shape.chains) > 1 else None,
            greedy=settings.greedy if Need.TREES in shape.needs else None,
            is_tree=settings.branches if {Need.TREES, Need.VERIFIES} <= shape.needs else None,
        )
        return deciding.decide(shape.deciders, scored, self.ops)

    def extend(
        self, batch: RoundBatch, population: Population, drafts: Drafts, decision: Decision
    ) -> Population:
        """Append the kept draft tokens, and make each particle a copy of its ancestor."""
        num_steps = batch.shape.num_steps
        # The draft has read all draft tokens but its last one; nothing where it skips the round.
        num_kept = decision.num_kept.amax(1) if batch.shape.chains else decision.num_columns
        unread = num_kept == (num_steps if num_steps or batch.shape.skips_draft else -1)
        self.ledger.descend(batch.rows, batch.committed, decision.ancestors, batch.shape.max_tail)
        extended = population.extend(drafts.tokens, drafts.ends, decision)
        return extended._replace(unread=unread)

    def add_bonus(
        self,
        batch: RoundBatch,
        population: Population,
        next_tokens: TokenDistribution,
        failure: torch.Tensor,
    ) -> Population:
        """Append one token of ``next_tokens``, drawn after resampling so that copies can differ."""
        settings, is_powered = batch.settings, Need.POWER in batch.shape.needs
        if is_powered or next_tokens.log_mass is not None:
            next_tokens, population = weigh_bonus(
                population,
                next_tokens,
                power=settings.power if is_powered else None,
                weighs=settings.weighs,
                weighed=settings.extends if batch.shape.chains and batch.shape.num_steps else None,
            )
        positions = population.output_lengths
        texts = population.texts[:, :, 1:]
        same_text = self.ops.same_text(texts, population.lengths, batch.may_stratify)
        own = self.ops.uniforms(settings.seeds, positions, Purpose.BONUS)
        uniforms, _ = self.ops.stratify(own, same_text)
        if batch.shape.needs & {Need.VERIFIES, Need.TREES}:
            # After verification all particles are copies of one, and must draw the same token.
            uniforms = torch.where(settings.weighs.unsqueeze(1), uniforms, own[:, :1])
        if Need.CHAINS in batch.shape.needs:
            uniforms = settings.of_first_chains(uniforms)
        tokens = next_tokens.draw(uniforms).unsqueeze(2)  # [G, N, 1]
        ends = settings.ends(tokens, positions.unsqueeze(2))
        if Need.RULES in batch.shape.needs:
            ends = batch.rules.ends(ends, tokens, population)
        return population.append_bonus(tokens.squeeze(2), ends.squeeze(2), failure)

    def measure(
        self,
        batch: RoundBatch,
        before: Population,
        after: Population,
        ancestors: torch.Tensor,
        p: TokenDistribution,
        drafts: Drafts,
    ) -> Population:
        """Add a round's distance to the target to its particles' sums; see `smc.fidelity.watch`.

        It is measured at one position of each request. q of a step exists when that is drafted,
        p only after the target's pass: until then one column of draft scores is kept, copied.
        """
        if drafts.coins is None or drafts.measured_q is None:  # K = 0
            return after
        path = Path(
            coins=drafts.coins,
            num_steps=batch.settings.num_steps,
            measured=batch.settings.measured,
            ancestors=ancestors,
            starts=before.lengths,
            lengths=after.lengths,
            tails=after.tokens,
        )
        return after._replace(fidelity=self.ops.watch(after.fidelity, path, p, drafts.measured_q))

    def narrow(self, batch: RoundBatch, population: Population) -> Narrowed:
        """Resample the tokens beyond the lag, and the whole tails of finished groups."""
        own = batch.settings
        end = population.narrow(own.seeds, own.lag, own.weighs, own.heaviest)
        self.ledger.descend(batch.rows, batch.committed, end.ancestors, batch.shape.max_tail)
        return end


NO_RULES = TextRules()


@dataclass(eq=False)
class Round:
    """Plays rounds on the tables of a server."""

    steps: Steps  # with the models
    _tables: Tables  # state of requests between rounds
    _corpus: Corpus | None = None  # texts of n-gram matches; None without such matches

    def play(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        reqs: Sequence[Req] = (),
        resized_from: torch.Tensor | None = None,
        loaded: tuple[RoundBatch, Population] | None = None,
    ) -> Outcome:
        """Play a round: advance all particles, and emit the tokens that each group's share.

        Args:
            reqs: the requests themselves, for rules that read sequences on the host.
            resized_from: return value of `resize` before this round.
            loaded: the batch and its particles, if they have already been read from the tables.
        """
        steps = self.steps
        if not shape.deciders:
            models = steps.target, steps.routed
            return play_plainly(models, self._tables, inputs, shape, reqs)
        batch, start = loaded or self._load_round(inputs, shape, reqs)
        slots = steps.reserve(batch, start)

        drafts = steps.propose(batch, start, slots)
        p, log_p, shown = steps.score(batch, drafts, slots)
        before = start
        if Need.POTENTIALS in shape.needs:
            # Potentials ran in parallel; what is missing is waited for.
            before = start.apply_potentials(batch.rules.scores(batch.reqs, batch.output_lengths))
        failure = failure_of_round(log_p, drafts, ~before.ended)
        decision, next_tokens = steps.decide(batch, before, drafts, p, log_p)
        extended = steps.extend(batch, before, drafts, decision)
        continued = steps.add_bonus(batch, extended, next_tokens, failure)
        if shown is not None:
            continued = self._tables.particles.logprobs.score_tails(
                batch.rows, before, continued, decision.ancestors, shown
            )
        continued = steps.measure(batch, before, continued, decision.ancestors, p, drafts)
        stages = Stages(
            resized_from=resized_from,
            start=start,
            before=before,
            drafts=drafts,
            decision=decision,
            failure=failure,
            extended=extended,
            continued=continued,
            end=steps.narrow(batch, continued),
        )
        outcome = self._commit(batch, stages)
        return outcome if steps.routed is None else outcome._replace(experts=steps.experts(slots))

    def play_in_slices(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        reqs: Sequence[Req],
        resized_from: torch.Tensor | None,
        most: int,
    ) -> Outcome:
        """Play a round in slices of at most ``most`` requests, which bounds its memory.

        All slices are loaded first, so that the host's rules for the last slice run while the
        first one plays. Arguments and return value are those of `play`.
        """
        slices = inputs.split(most)
        reqs_of = [list(reqs[start : start + most]) for start in range(0, len(reqs), most)]
        resized_of = [None] * len(slices) if resized_from is None else resized_from.split(most)
        loaded = [self._load_round(one, shape, reqs_of[i]) for i, one in enumerate(slices)]
        each = zip(slices, reqs_of, resized_of, loaded, strict=True)
        played = [self.play(one, shape, own, resized, begun) for one, own, resized, begun in each]
        return joined(played)

    def resize(
        self, inputs: RoundInputs, shape: RoundShape, reqs: Sequence[Req]
    ) -> torch.Tensor | None:
        """Resize populations to the numbers of particles of this round, where one has another.

        Returns:
            ``[G, N]`` the ancestor of each particle, with N the larger of old and new; or None.
        """
        states = map(state_of, reqs)
        sizes = [(state.last.num_particles, state.now.num_particles) for state in states]
        if all(before == after for before, after in sizes):
            return None
        num_particles = max(map(max, sizes))
        wider = shape._replace(num_particles=num_particles, needs=shape.needs & {Need.POTENTIALS})
        batch, population = self._load_round(inputs, wider, reqs)
        resized, ancestors = self.steps.resize(batch, population)
        none = torch.zeros_like(batch.committed)
        self._tables.particles.scatter(batch.rows, resized, none)
        return ancestors

    def _load_round(
        self, inputs: RoundInputs, shape: RoundShape, reqs: Sequence[Req]
    ) -> tuple[RoundBatch, Population]:
        """Read the batch and its particles from the tables."""
        tables, rows, needs = self._tables, inputs.rows, shape.needs
        settings = tables.requests.gather(rows)
        allocated, own_particles, own_steps, is_exact = inputs.known.unbind()
        if shape.budget is not None:
            settings = settings.bounded(own_particles, own_steps, is_exact)
        before, starts, last_two, position = tables.particles.gather(
            rows, shape.num_particles, shape.max_tail, scored=Need.POTENTIALS in needs
        )
        if shape.logprobs.own:
            before = tables.particles.logprobs.gather(rows, before, shape.logprobs)
        seeds = self.steps.ops.round_seeds(settings.seeds, position.squeeze(1))
        settings = settings._replace(seeds=seeds)
        # Sampled chains that are verified as one multi-draft must be independent.
        has_trees = Need.TREES in needs
        dependent = settings.weighs | settings.greedy if has_trees else settings.weighs
        batch = RoundBatch(
            reqs=list(reqs),
            shape=shape,
            rows=rows,
            committed=inputs.committed,
            allocated=allocated,
            output_lengths=starts,
            column=torch.arange(shape.num_steps, device=rows.device),
            position=position.expand_as(starts),
            last_two=last_two,
            may_stratify=before.present & dependent.unsqueeze(1),
            settings=settings,
            rules=self._rules(reqs, before) if Need.RULES in needs else NO_RULES,
            edits=self._edits(reqs, settings, before, starts) if Need.EDITS in needs else None,
            matches=self._matches(reqs, before) if Need.MATCHES in needs else None,
        )
        return batch, before

    def _edits(
        self, reqs: Sequence[Req], settings: Settings, before: Population, starts: torch.Tensor
    ) -> Edits:
        """Return the logit edits of the sequences before the round, of lengths ``starts``."""
        # The last emitted token is not in the counts: particles may differ in a first token.
        texts, lengths, table = before.texts[:, :, 1:], before.lengths + 1, self._tables.edits
        return table.of(reqs, settings.rows, settings, starts=starts, texts=texts, lengths=lengths)

    def _rules(self, reqs: Sequence[Req], before: Population) -> TextRules:
        """Return the rules of the sequences before the round."""
        vocab_size, device = self._tables.requests.vocab_size, before.lengths.device
        return TextRules.of(list(reqs), before, vocab_size, device)

    def _matches(self, reqs: Sequence[Req], before: Population) -> Matches:
        """Return the n-gram matches of the sequences before the round."""
        assert self._corpus is not None, "a request has matches where the server keeps texts alone"
        return Matches.of(self._corpus, list(reqs), before)

    def _commit(self, batch: RoundBatch, stages: Stages) -> Outcome:
        """Emit the tokens that all particles share, and store the rest for the next round."""
        tables, shape, needs = self._tables, batch.shape, batch.shape.needs
        logprobs = tables.particles.logprobs
        decision, continued, end = stages.decision, stages.continued, stages.end
        narrowed, texts = end.population, end.population.texts[:, 0]
        counts = end.num_to_emit()
        tables.ledger.commit(
            Arenas(batch.rows, batch.committed, batch.allocated),
            narrowed.lengths,
            counts,
            max_tail=shape.max_tail,
            max_arena=shape.max_arena,
        )
        if batch.edits is not None:
            # Counts lag one token: the last emitted one is counted with the next.
            tables.ops.count_tokens(batch.edits.columns, batch.rows, texts[:, 1:], counts)
        last_emitted = tables.particles.scatter(batch.rows, narrowed, counts)
        num_weights, num_chains = batch.settings.num_particles, batch.settings.chains
        counters = tables.counters.add_round(
            batch.rows,
            fidelity=narrowed.fidelity[:, 0],
            resample_ct=decision.resampled,
            narrow_ct=end.dropped,
            all_zero_ct=decision.all_zero,
            nan_ct=stages.failure > 0,
            exact_ct=decision.verified,
            killed_ct=decision.num_killed,
            ess_sum=decision.ess,
            particles_sum=num_weights // num_chains if Need.CHAINS in needs else num_weights,
            steps_sum=batch.settings.num_steps,
            ancestors=end.num_roots,
            log_evidence=end.log_evidence,
        )
        return Outcome(
            tokens=texts[:, 2:],
            counts=counts,
            new_seq_lens=batch.committed + counts,
            last_emitted=last_emitted,
            num_correct_drafts=decision.num_columns,
            counters=counters,
            failure=stages.failure,
            first_tokens=narrowed.first_token() if Need.OPEN_TOKEN in needs else None,
            particles=shown_particles(continued, narrowed) if Need.PARTICLES in needs else None,
            logprobs=logprobs.emitted(batch.rows, narrowed) if shape.logprobs.own else None,
            trace=stages.traced(batch.reqs) if Need.TRACE in needs else None,
        )
