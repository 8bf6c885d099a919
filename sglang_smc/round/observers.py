"""Record a round for requests that set ``trace``, and measure its distance to the target.

A trace: the round's tensors are kept on the device and copied with its result; the host makes a
`RoundRecord` of them. Rounds without a request that sets ``trace`` keep nothing.

The distance (`smc.fidelity` has the statistics) is measured at one position of each request and
round. The draft distribution of a step exists when the step is drafted, p's row only after the
target's pass, so the draft's scores of that column are held until then. That takes the memory of
one draft step, and reads one of the K + 1 columns twice more: by estimate under 1 % of a round
on a GPU.
"""

from typing import NamedTuple

import torch

from sglang_smc.ops.interface import Ops
from sglang_smc.options.request import RequestConfig
from sglang_smc.proposers.ngram import as_distribution
from sglang_smc.round.batch import Decision, Drafts, RoundBatch
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.fidelity import Path, Watchable
from sglang_smc.smc.randomness import Purpose
from sglang_smc.state.metrics import finite
from sglang_smc.state.population import Population
from sglang_smc.state.record import RoundRecord
from sglang_smc.state.request import RequestState, state_of

_NO_TOKEN = -1


class Traced(NamedTuple):
    """One round of the G requests of a batch; places beyond a request's own N are undefined."""

    begins: list[bool]  # of each request: whether this is its first round after a prefill
    resized_from: torch.Tensor | None  # [G, N] where N has changed for some request
    num_particles: torch.Tensor  # [G]
    first_tokens: torch.Tensor  # [G, N] the token before each tail at the start of the round
    log_weights_before: torch.Tensor  # [G, N]
    log_potentials: torch.Tensor | None  # [G, N] where some request has potentials
    drafted: torch.Tensor  # [G, N, K]
    num_drafted: torch.Tensor  # [G, N]
    num_kept: torch.Tensor  # [G, N]
    log_weights: torch.Tensor  # [G, N]
    ess: torch.Tensor  # [G]
    resampled: torch.Tensor  # [G] bool
    all_zero: torch.Tensor  # [G] bool
    failure: torch.Tensor  # [G] int64 `Failure`
    ancestors: torch.Tensor  # [G, N]
    bonus: torch.Tensor  # [G, N], `_NO_TOKEN` where there is none
    ended: torch.Tensor  # [G, N] bool
    narrowed_to: torch.Tensor  # [G, N]
    log_weights_after: torch.Tensor  # [G, N]

    def record_of(
        self, group: int, state: RequestState, emitted: list[int], log_evidence: float
    ) -> RoundRecord:
        """Return the record of one request's round, on the host.

        Args:
            group: the request's index in the batch.
            state: with the records of its rounds so far.
            emitted: tokens of the round in SGLang's lists.
            log_evidence: log Z-hat at the end of the round.
        """
        size = int(self.num_particles[group])
        begins = self.first_tokens[group, :size].tolist() if self.begins[group] else None
        ancestors = self.ancestors[group, :size].tolist()
        narrowed_to = self.narrowed_to[group, :size].tolist()
        before = self.log_weights_before[group, :size]
        weighed, base, potentials = self.log_weights[group, :size], before, None
        if self.log_potentials is not None and state.potentials:
            potentials = self.log_potentials[group, :size]
            base = before + potentials
        gain = float(weighed.logsumexp(0) - base.logsumexp(0))
        config = state.config
        knows_evidence = (config.weighs or config.is_exact) and not state.has_lost_tails
        return RoundRecord(
            emitted_before=state.unrecorded if self.begins[group] else [],
            begins=begins,
            resized_from=self._resized_from(group, state, size),
            log_weights_before=_finite(before),
            drafted=_cut_to(self.drafted[group], self.num_drafted[group, :size]),
            kept=self.num_kept[group, :size].tolist(),
            log_weights=_finite(weighed),
            log_potentials=None if potentials is None else _finite(potentials),
            ess=float(self.ess[group].nan_to_num(0.0)),
            log_block_evidence=finite(gain),
            cut=self._cut(group, config, ancestors),
            resampled=bool(self.resampled[group]),
            ancestors=ancestors,
            bonus=[None if one == _NO_TOKEN else one for one in self.bonus[group, :size].tolist()],
            ended=self.ended[group, :size].tolist(),
            narrowed_to=None if narrowed_to == list(range(size)) else narrowed_to,
            log_weights_after=_finite(self.log_weights_after[group, :size]),
            log_evidence=finite(log_evidence) if knows_evidence else None,
            emitted=[*self._closed_token(group, state, begins), *emitted],
        )

    def _resized_from(self, group: int, state: RequestState, size: int) -> list[int] | None:
        """Return the earlier particle of each, if the record before has another number of them."""
        if self.begins[group] or not state.rounds or len(state.rounds[-1].ancestors) == size:
            return None
        assert self.resized_from is not None, "N changes by a resizing step alone"
        return self.resized_from[group, :size].tolist()

    def _closed_token(self, group: int, state: RequestState, begins: list[int] | None) -> list[int]:
        """Return the first token, if particles differed in it and share it since this round.

        If they started with one token, it counts as emitted there.
        """
        token = state.open_token.shared
        if token is None:
            return []
        if begins is None:
            begins = next(one.begins for one in reversed(state.rounds) if one.begins is not None)
        return [] if len(set(begins)) == 1 else [token]

    def _cut(self, group: int, config: RequestConfig, ancestors: list[int]) -> str:
        """Return why the round kept no more columns."""
        if self.failure[group] > 0:
            return "failure"
        drafted, kept = self.num_drafted[group], self.num_kept[group]
        if not config.weighs:
            winner = ancestors[0]
            return "none" if kept[winner] >= drafted[winner] else "verification"
        size = len(ancestors)
        if bool((kept[:size] >= drafted[:size]).all()):
            return "none"
        if config.extends:
            return "verification"
        if config.resample_at == "token" and bool(self.resampled[group]) and bool(kept.any()):
            return "ess"
        return "dead" if bool(self.all_zero[group]) else "evidence"


def trace_of(
    batch: RoundBatch,
    begun: Population,
    before: Population,
    drafts: Drafts,
    decision: Decision,
    extended: Population,
    continued: Population,
    narrowed: Population,
    narrowed_to: torch.Tensor,
    resized_from: torch.Tensor | None,
) -> Traced:
    """Return the trace of a round, on the device.

    Args:
        begun: population at the start.
        before: at the start, with the latest potential values.
        extended: with the kept draft tokens, after resampling.
        continued: after the bonus token.
        narrowed: at the end, before emission.
        narrowed_to: ``[G, N]`` ancestors in the last step.
        resized_from: ``[G, N]`` ancestors in the resize before the round.
    """
    # A stopped group has no tails, and no bonus tokens.
    took_bonus = ~extended.ended & (continued.lengths == extended.lengths + 1)
    return Traced(
        begins=[state_of(req).take_start() for req in batch.reqs],
        resized_from=resized_from,
        num_particles=before.present.sum(1),
        first_tokens=before.last_emitted,
        log_weights_before=begun.log_weights,
        log_potentials=None if before.scores is None else _gains(begun, before),
        drafted=drafts.tokens,
        num_drafted=drafts.before_end.sum(2),
        num_kept=decision.num_kept,
        log_weights=decision.cut.log_weights,
        ess=decision.cut.ess,
        resampled=decision.cut.resample,
        all_zero=decision.cut.all_zero,
        failure=decision.failure,
        ancestors=decision.resampled.ancestors,
        bonus=torch.where(took_bonus, continued.last_tokens, _NO_TOKEN),
        ended=continued.ended,
        narrowed_to=narrowed_to,
        log_weights_after=narrowed.log_weights,
    )


def _gains(begun: Population, before: Population) -> torch.Tensor:
    """Return the potentials' contribution to log-weights, ``[G, N]``; 0 for dead particles."""
    lives = begun.log_weights > -torch.inf
    return torch.where(lives, before.log_weights - begun.log_weights, 0.0)


def _finite(values: torch.Tensor) -> list[float | None]:
    return [finite(value) for value in values.tolist()]


def _cut_to(tokens: torch.Tensor, counts: torch.Tensor) -> list[list[int]]:
    """Return the first ``counts[n]`` of each row of ``tokens`` ``[N, K]``."""
    rows = zip(tokens.tolist(), counts.tolist(), strict=False)
    return [row[:count] for row, count in rows]


def choose(ops: Ops, batch: RoundBatch) -> Watchable:
    """Choose the measured columns, before anything else of the round is drawn."""
    settings = batch.settings
    numbers = ops.uniforms(settings.seeds, batch.position[:, :1], Purpose.WATCH)[:, 0]
    return Watchable(numbers, settings.num_steps, settings.normalized, settings.greedy)


def look(
    ops: Ops,
    batch: RoundBatch,
    before: Population,
    after: Population,
    ancestors: torch.Tensor,
    p: TokenDistribution,
    drafts: Drafts,
) -> Population:
    """Add the measurements of a round to the sums of its particles.

    Args:
        before: the particles at the start of the round.
        after: the particles at its end.
        ancestors: ``[G, N]`` of the latter among the former.
        p: the target distribution after each prefix of each chain.
        drafts: with the draft's scores in the measured columns.
    """
    if drafts.watchable is None or drafts.held is None:  # K = 0
        return after
    rows = drafts.held.unflatten(0, batch.starts.shape)
    q = TokenDistribution.of(ops, rows, batch.q_rules, batch.shape.kinds)
    if batch.matches is not None:  # the held scores are log q itself
        q = as_distribution(drafts.held, q)
    path = Path(ancestors, before.lengths, after.lengths, after.tokens)
    return after._replace(fidelity=ops.watch(after.fidelity, drafts.watchable, path, p, q))
