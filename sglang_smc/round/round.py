"""One round of SMC speculative decoding, for all particles of all running requests at once.

`Round.play` is the algorithm: draft, score, reweight and resample (or verify), extend, bonus,
narrow, commit. `steps` has the steps; docs/algorithm.md explains them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_smc.drafts.corpus import Corpus
from sglang_smc.drafts.ngram import Matches
from sglang_smc.ops.interface import Ops
from sglang_smc.requests.rules import TextRules
from sglang_smc.requests.text_rule import BatchTexts
from sglang_smc.round.batch import RoundBatch, RoundInputs, RoundShape
from sglang_smc.round.decision import Decision
from sglang_smc.round.result import Outcome, Particles
from sglang_smc.round.steps import Steps
from sglang_smc.round.tables import Tables
from sglang_smc.round.trace import trace_of
from sglang_smc.round.watch import look
from sglang_smc.state.logprobs import score_tails
from sglang_smc.state.population import Population
from sglang_smc.state.transfer import joined

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

NO_RULES = TextRules()


class Round:
    """Plays rounds on the tables of a server.

    Args:
        steps: with its models.
        tables: where requests live between rounds.
        ops: the small operations.
        corpus: what n-gram matches are of, where there are any.
    """

    def __init__(
        self, steps: Steps, tables: Tables, ops: Ops, corpus: Corpus | None = None
    ) -> None:
        self._steps = steps
        self._tables = tables
        self._ops = ops
        self._corpus = corpus

    def play(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        reqs: "Sequence[Req]" = (),
        resized_from: torch.Tensor | None = None,
        loaded: tuple[RoundBatch, Population] | None = None,
    ) -> Outcome:
        """Play a round: from every particle's last token to what all of them agree on.

        Args:
            inputs: of the G requests.
            shape: of the batch.
            reqs: the requests themselves, for rules that read texts on the host.
            resized_from: what `resize` has said before this round.
            loaded: the batch and its particles, where they have been read from the tables.
        """
        steps = self._steps
        batch, before = loaded or self._load_round(inputs, shape, reqs)
        slots = steps.reserve(batch, before)

        drafts = steps.propose(batch, before, slots)
        p, shown = steps.score(batch, drafts, slots)
        begun, before = before, steps.judge(batch, before)  # potentials have worked meanwhile
        decision = steps.decide(batch, before, drafts, p)  # reweight and resample, or verify
        extended = steps.extend(batch, before, drafts, decision)
        continued = steps.add_bonus(batch, extended, decision.next_tokens)
        ancestors = decision.resampled.ancestors
        if shown is not None:
            listed = self._tables.logprobs.listed_ids(batch.rows, shape.logprobs.listed)
            continued = score_tails(self._ops, before, continued, ancestors, shown, listed)
        continued = continued.stop(decision.failure > 0)
        continued = look(self._ops, batch, before, continued, ancestors, p, drafts)
        elected = continued.elect()
        narrowed, narrowed_to, by_lag, log_evidence = steps.narrow(batch, elected)
        outcome = self._commit(batch, continued, narrowed, decision, by_lag, log_evidence)
        if not shape.traces:
            return outcome
        populations = begun, before, drafts, decision, extended, continued, narrowed
        return outcome._replace(trace=trace_of(batch, *populations, narrowed_to, resized_from))

    def play_in_slices(
        self,
        inputs: RoundInputs,
        shape: RoundShape,
        reqs: "Sequence[Req]",
        resized_from: torch.Tensor | None,
        most: int,
    ) -> Outcome:
        """Play a round of at most ``most`` requests at a time, which bounds its memory.

        All slices are loaded first: what the host is asked for the last of them is under way while
        the first one plays. Arguments and result are those of `play`.
        """
        parts = inputs.split(most)
        of = [list(reqs[start : start + most]) for start in range(0, len(reqs), most)]
        whence = [None] * len(parts) if resized_from is None else resized_from.split(most)
        loaded = [self._load_round(part, shape, of[i]) for i, part in enumerate(parts)]
        return joined(
            [self.play(part, shape, of[i], whence[i], loaded[i]) for i, part in enumerate(parts)]
        )

    def resize(self, inputs: RoundInputs, shape: RoundShape, reqs: "Sequence[Req]") -> torch.Tensor:
        """Bring populations to the sizes that they have in this round.

        Returns:
            ``[G, N]``, of whom each particle is a copy, for the most that a group had or has.
        """
        as_held = shape._replace(
            num_particles=shape.num_held, edits=False, has_rules=False, has_matches=False
        )
        batch, held = self._load_round(inputs, as_held, reqs)
        resized, ancestors = self._steps.resize(batch, held)
        self._tables.particles.scatter(batch.rows, resized)
        if resized.logprobs is not None:
            self._tables.logprobs.scatter(batch.rows, resized.logprobs)
        if resized.judged is not None:
            self._tables.judged.scatter(batch.rows, resized.judged)
        return ancestors

    def _load_round(
        self, inputs: RoundInputs, shape: RoundShape, reqs: "Sequence[Req]"
    ) -> tuple[RoundBatch, Population]:
        """The batch and its particles, as they stand in the tables."""
        tables, rows = self._tables, inputs.rows
        before = tables.particles.gather(rows, shape.num_particles, shape.max_tail)
        starts, last_two = before.output_lengths, before.last_two
        furthest = starts.amax(1, keepdim=True)  # [G, 1]
        if shape.logprobs.own:
            widest = shape.num_particles, shape.max_tail
            carried = tables.logprobs.gather(rows, *widest, shape.logprobs)
            before = before._replace(logprobs=carried)
        if shape.judges:
            before = before._replace(judged=tables.judged.gather(rows, shape.num_particles))
        settings = tables.requests.gather(rows)
        allocated, *sizes = inputs.known.unbind()
        if shape.budget is not None:
            settings = settings.bounded(*sizes)
        p_rules, q_rules = settings.sampling_rules(), settings.sampling_rules(draft=True)
        seeds = self._ops.round_seeds(settings.seeds, furthest.squeeze(1))
        settings = settings._replace(seeds=seeds)
        rules = NO_RULES
        if shape.has_rules:
            vocab_size = tables.requests.vocab_size
            rules = TextRules.of(BatchTexts(list(reqs), before, vocab_size, rows.device))
        edits = tables.edits.of_round(reqs, rows, settings, before) if shape.edits else None
        batch = RoundBatch(
            reqs=list(reqs),
            shape=shape,
            rows=rows,
            committed=inputs.committed,
            allocated=allocated,
            starts=starts,
            column=torch.arange(shape.num_steps, device=rows.device),
            furthest=furthest.expand_as(starts),
            last_two=last_two,
            may_stratify=before.present & settings.weighs.unsqueeze(1),
            settings=settings,
            p_rules=p_rules,
            q_rules=q_rules,
            rules=rules,
            edits=edits,
            matches=self._matches(reqs, before) if shape.has_matches else None,
        )
        return batch, before

    def _matches(self, reqs: "Sequence[Req]", before: Population) -> Matches:
        """What may follow the texts that the round starts from."""
        assert self._corpus is not None, "a request has matches where the server keeps texts alone"
        return Matches.of(self._corpus, list(reqs), before)

    def _commit(
        self,
        batch: RoundBatch,
        continued: Population,
        narrowed: Population,
        decision: Decision,
        by_lag: torch.Tensor,
        log_evidence: torch.Tensor,
    ) -> Outcome:
        """Emit what all particles agree on, and store the rest for the next round.

        Args:
            continued: before the final draw, which ``narrowed`` has behind it.
            by_lag: ``[G]`` bool: particles went for the lag's sake.
            log_evidence: ``[G]`` float64 log Z-hat.
        """
        tables, shape, ops = self._tables, batch.shape, self._ops
        tails = narrowed.texts[:, :, 1:]  # with the token before each
        counts = ops.common_tail(tails, narrowed.lengths, narrowed.present)  # [G]
        if narrowed.judged is not None:
            counts = narrowed.held_back(counts)
        num_roots = ops.num_distinct(continued.roots, continued.present)  # [G]
        num_parents = ops.num_distinct(decision.resampled.ancestors, continued.present)  # [G]
        tables.ledger.commit(
            batch.rows,
            committed=batch.committed,
            allocated=batch.allocated,
            lengths=narrowed.lengths,
            counts=counts,
            max_tail=shape.max_tail,
            max_arena=shape.max_arena,
        )
        if batch.edits is not None:
            # The last emitted token is settled once a token is emitted behind it.
            ops.count_tokens(batch.edits.columns, batch.rows, tails[:, 0], counts)
        after = narrowed.emit(counts)
        tokens, last_emitted = narrowed.tokens[:, 0], after.last_emitted[:, 0]
        first_token = narrowed.first_token() if shape.has_open_token else None
        tables.particles.scatter(batch.rows, after)
        if after.judged is not None:
            tables.judged.scatter(batch.rows, after.judged)
        emitted = None
        if after.logprobs is not None and narrowed.logprobs is not None:
            tables.logprobs.scatter(batch.rows, after.logprobs)
            roots = narrowed.roots[:, 0]
            emitted = tables.logprobs.emitted(batch.rows, narrowed.logprobs, roots)
        settings = batch.settings
        counters = tables.counters.add_round(
            batch.rows,
            cut=decision.cut,
            failed=decision.failure > 0,
            verified=decision.verified,
            killed=(settings.num_particles - num_parents) * decision.cut.resample,
            narrowed=by_lag,
            ancestors=num_roots,
            num_particles=settings.num_particles,
            num_steps=settings.num_steps,
            fidelity=narrowed.fidelity[:, 0],
            log_evidence=log_evidence,
        )
        return Outcome(
            tokens=tokens,
            counts=counts,
            new_seq_lens=batch.committed + counts,
            last_emitted=last_emitted,
            num_correct_drafts=decision.cut.num_columns,
            counters=counters,
            failure=decision.failure,
            first_tokens=first_token,
            particles=Particles.of(continued, narrowed) if shape.shows_particles else None,
            logprobs=emitted,
        )
