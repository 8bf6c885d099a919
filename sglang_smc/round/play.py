"""Play one round of SMC speculative decoding for all particles of all running requests.

`ServedRound.play` lists the steps, which `smc.steps` has; the rest is a server's: tables of
requests, rules that read text, KV slots, and tokens that are emitted. The host waits for the device
only where some request's rules read its sequences.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.kv import arena
from sglang_smc.kv.transfer import joined
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.recorder import PassRecording, Record
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.base import DraftProposer, DraftSlots
from sglang_smc.proposers.ngram import Corpus, CorpusMatches
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables
from sglang_smc.round.experts import ReturnedExperts
from sglang_smc.round.extras import Extra, Stages
from sglang_smc.round.logprobs import ReturnedLogprobs
from sglang_smc.round.particles import ReturnedParticles
from sglang_smc.round.plain import play_plainly
from sglang_smc.round.result import Outcome
from sglang_smc.round.trace import ReturnedTrace
from sglang_smc.rules.registry import TextRules
from sglang_smc.smc import prefixes, steps, weighing
from sglang_smc.smc.deciding import Drafts
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.ledger import Arenas, KVLocations, Wanted
from sglang_smc.smc.population import Population
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import BatchSettings, Need
from sglang_smc.smc.steps import Batch
from sglang_smc.state.request import state_of


@dataclass(eq=False)
class ServedRound:
    """Plays rounds on the tables of a server."""

    target: ParticleForward  # the target model, over particles
    draft: DraftProposer
    _tables: Tables  # state of requests between rounds
    _corpus: Corpus | None = None  # texts of n-gram matches; None where a model drafts
    routed: InitVar[torch.Tensor | None] = None  # `upstream.experts_of_passes`

    def __post_init__(self, routed: torch.Tensor | None) -> None:
        """List what rounds may return beside tokens."""
        self.extras: tuple[Extra, ...] = (
            ReturnedLogprobs(self._tables.particles.logprobs),
            ReturnedParticles(),
            ReturnedTrace(),
        )
        if routed is not None:
            self.extras += (ReturnedExperts(self.target, routed),)

    def record_passes(
        self, record: Record, config: SMCConfig, sizes: Sequence[int], device: str
    ) -> None:
        """Capture the models' passes, and replay them from now on, in rounds without a graph.

        Call it after whole rounds are captured, since a graph must not contain another's replay.
        """
        max_tail = arena.max_tail(config) + 1
        recording = PassRecording(record, config.num_particles, sizes, max_tail, device)
        if not any(extra.reads_pass for extra in self.extras):
            self.target = recording.of(self.target, "chain_logits", [config.num_steps + 1])
        self.draft = self.draft.recorded(recording)

    def play(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        reqs: Sequence[Req] = (),
        resized_from: torch.Tensor | None = None,
        loaded: tuple[Batch, Population] | None = None,
    ) -> Outcome:
        """Play a round: advance all particles, and emit the tokens that each group's share.

        Args:
            reqs: the requests themselves, for rules that read sequences on the host.
            resized_from: return value of `resize` before this round.
            loaded: the batch and its particles, if they have already been read from the tables.
        """
        extras = [extra for extra in self.extras if extra.always or extra.name in shape.extras]
        if not shape.deciders:
            return play_plainly(
                self.target,
                tables=self._tables,
                inputs=inputs,
                shape=shape,
                reqs=reqs,
                extras=extras,
            )
        batch, start = loaded or self._load_round(inputs, shape, reqs)
        slots = self._reserve(inputs, shape, batch.settings, start)
        sharing = batch.ops.sharing and batch.ops.sharing(slots)
        batch = batch._replace(slots=slots, sharing=sharing)

        drafts = steps.propose(batch, start) if batch.num_steps else steps.read_last(batch, start)
        chains = self._chains(batch, drafts, slots, reqs)
        p, log_p = steps.score(batch, drafts, self.target.chain_logits(chains))
        revalued = steps.revalue(batch, start)
        failure = steps.failure_of_round(log_p, drafts, ~revalued.ended)
        decision, next_tokens = steps.decide(batch, revalued, drafts, p, log_p)
        extended = steps.extend(batch, revalued, drafts, decision)
        continued = steps.add_bonus(batch, extended, next_tokens, failure)
        for extra in extras:
            continued = extra.score(batch, revalued, continued, decision.ancestors, p)
        continued = steps.measure(batch, revalued, continued, decision.ancestors, p, drafts)
        stages = Stages(
            resized_from=resized_from,
            start=start,
            revalued=revalued,
            drafts=drafts,
            decision=decision,
            failure=failure,
            extended=extended,
            continued=continued,
            end=steps.narrow(batch, continued),
        )
        outcome = self._commit(inputs, shape, batch, stages)
        returned: dict[str, Any] = {}
        for extra in extras:
            returned[extra.name] = extra.emit(inputs.rows, chains, stages)
        return outcome._replace(extras=returned)

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
        states = list(map(state_of, reqs))
        before = [state.config_before.num_particles for state in states]
        after = [state.config_now.num_particles for state in states]
        if before == after:
            return None
        num_particles = max(before + after)
        wider = shape._replace(num_particles=num_particles, needs=shape.needs & {Need.POTENTIALS})
        batch, population = self._load_round(inputs, wider, reqs)
        settings = batch.settings
        present = population.present
        place = torch.arange(present.shape[1], device=present.device)
        ancestors, log_weights, log_evidence = weighing.resample(
            population.log_weights,
            present.sum(1) != settings.num_particles,
            present,
            batch.ops.uniforms(settings.seeds, batch.position, Purpose.RESIZE),
            settings.scheme,
            after=place < settings.num_particles.unsqueeze(1),
        )
        # The draft may have yet to read the last token with KV, in the particle's row: `unread`.
        rows = inputs.rows
        first = inputs.committed - 1
        self._tables.ledger.descend(rows, first, ancestors, shape.max_tail)
        resampled = population.resample(ancestors, log_weights, log_evidence)
        resized = resampled.resize(settings.num_particles)
        self._tables.particles.scatter(rows, resized, torch.zeros_like(rows))
        return ancestors

    def _load_round(
        self, inputs: RoundInputs, shape: RoundShape, reqs: Sequence[Req]
    ) -> tuple[Batch, Population]:
        """Read the batch and its particles from the tables."""
        tables = self._tables
        rows = inputs.rows
        needs = shape.needs
        settings = tables.requests.gather(rows)
        if shape.budget is not None:
            settings = settings.bounded(*inputs.sizes)
        before, starts, last_two, position = tables.particles.gather(
            rows, shape.num_particles, shape.max_tail, scored=Need.POTENTIALS in needs
        )
        for extra in self.extras:
            if extra.always or extra.name in shape.extras:
                before = extra.load(rows, shape, before)
        seeds = tables.ops.round_seeds(settings.seeds, position.squeeze(1))
        # Sampled chains that are verified as one multi-draft must be independent.
        dependent = settings.weighs | settings.greedy if Need.TREES in needs else settings.weighs
        batch = Batch(
            ops=tables.ops,
            draft=self.draft,
            settings=settings._replace(seeds=seeds),
            needs=needs,
            deciders=shape.deciders,
            num_steps=shape.num_steps,
            output_lengths=starts,
            position=position.expand_as(starts),
            last_two=last_two,
            may_stratify=before.present & dependent.unsqueeze(1),
            extends=settings.extends if Need.EXTENDS in needs and shape.num_steps else None,
            ends=settings.ends,
            rules=self._rules(reqs, before) if Need.RULES in needs else None,
            edits=self._edits(reqs, settings, before, starts) if Need.EDITS in needs else None,
            matches=self._matches(reqs, before) if Need.MATCHES in needs else None,
        )
        return batch, before

    def _reserve(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        settings: BatchSettings,
        population: Population,
    ) -> DraftSlots:
        """Return the KV slots of each particle's next K + 1 positions, and of the one before."""
        ledger = self._tables.ledger
        wanted = Wanted(
            rows=inputs.rows,
            committed=inputs.committed,
            allocated=inputs.arena_ends,
            lengths=population.lengths,
            idle=population.ended,
            unread=population.unread,
            num_particles=settings.num_particles,
            num_steps=settings.num_steps,
        )
        slots, positions, particle_rows = ledger.reserve(wanted, shape.num_steps + 1)
        # Ended particles compute past their last token, too.
        max_tail = shape.max_tail + 1
        locations = KVLocations(inputs.rows, inputs.committed, particle_rows, max_tail)
        return DraftSlots(slots, positions, locations, ledger)

    def _chains(
        self, batch: Batch, drafts: Drafts, slots: DraftSlots, reqs: Sequence[Req]
    ) -> Chains:
        """Return [last, x_1..x_K] of each particle, which the target reads in one pass."""
        last = batch.last_two[:, :, 1:]
        # Tokens after an end are replaced: a NaN there would spread to earlier columns (0 * NaN).
        read = torch.where(drafts.up_to_end, drafts.tokens, last)
        chain = torch.cat([last, read], dim=2)  # [G, N, K + 1]
        written = slots.slots[1:].permute(1, 2, 0)  # [G, N, K + 1]
        return Chains(chain, slots.positions[1], written, slots.locations, reqs)

    def _edits(
        self, reqs: Sequence[Req], settings: BatchSettings, before: Population, starts: torch.Tensor
    ) -> Edits:
        """Return the logit edits of the sequences before the round, of lengths ``starts``."""
        # The last emitted token is not in the counts: particles may differ in a first token.
        texts = before.texts[:, :, 1:]
        lengths = before.lengths + 1
        table = self._tables.edits
        return table.of(reqs, settings.rows, settings, starts=starts, texts=texts, lengths=lengths)

    def _rules(self, reqs: Sequence[Req], before: Population) -> TextRules:
        """Return the rules of the sequences before the round."""
        vocab_size = self._tables.requests.vocab_size
        device = before.lengths.device
        return TextRules.of(list(reqs), before, vocab_size, device)

    def _matches(self, reqs: Sequence[Req], before: Population) -> CorpusMatches:
        """Return the n-gram matches of the sequences before the round."""
        assert self._corpus is not None, "n-gram matches are of a server that keeps texts"
        return CorpusMatches.of(self._corpus, list(reqs), before)

    def _commit(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        batch: Batch,
        stages: Stages,
    ) -> Outcome:
        """Emit the tokens that all particles share, and store the rest for the next round."""
        tables = self._tables
        rows = inputs.rows
        decision = stages.decision
        end = stages.end
        narrowed = end.population
        texts = end.population.texts[:, 0]
        counts = end.num_to_emit()
        tables.ledger.commit(
            Arenas(rows, inputs.committed, inputs.arena_ends),
            narrowed.lengths,
            counts,
            max_tail=shape.max_tail,
            max_arena=shape.max_arena,
        )
        if batch.edits is not None:
            # Counts lag one token: the last emitted one is counted with the next.
            tables.ops.count_tokens(batch.edits.columns, rows, texts[:, 1:], counts)
        last_emitted = tables.particles.scatter(rows, narrowed, counts)
        counters = tables.counters.add_round(
            rows,
            fidelity=narrowed.fidelity[:, 0],
            resample_ct=decision.resampled,
            narrow_ct=end.dropped,
            all_zero_ct=decision.all_zero,
            nan_ct=stages.failure > 0,
            exact_ct=decision.verified,
            killed_ct=decision.num_killed,
            ess_sum=decision.ess,
            particles_sum=batch.settings.num_particles,
            steps_sum=batch.settings.num_steps,
            ancestors=end.num_roots,
            log_evidence=end.log_evidence,
        )
        return Outcome(
            tokens=texts[:, 2:],
            counts=counts,
            new_seq_lens=inputs.committed + counts,
            last_emitted=last_emitted,
            num_correct_drafts=decision.num_columns,
            counters=counters,
            failure=stages.failure,
            first_tokens=narrowed.first_token() if Need.OPEN_TOKEN in shape.needs else None,
            num_nodes=_count_nodes(batch, stages) if shape.budget is not None else None,
        )


def _count_nodes(batch: Batch, stages: Stages) -> torch.Tensor | None:
    """Return the distinct nodes of each request's tree, `prefixes.count_nodes`; None for chains."""
    start = stages.start
    drafts = stages.drafts
    if start.texts.shape[1] == 1:
        return None
    # A tree's pruned chains, of log q inf, repeat another's tokens.
    read = drafts.up_to_end & ~drafts.log_q.isposinf()
    live = torch.cat([~start.ended.unsqueeze(2), read], dim=2)  # [G, N, K + 1]
    same_text = batch.ops.same_text(start.texts[:, :, 1:], start.lengths, ~start.ended)
    return prefixes.count_nodes(drafts.tokens, live, same_text)
