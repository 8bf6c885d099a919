"""What a round tells of its particles, for requests that ask for a trace.

The device hands over what the round has at hand, once it has come so far; the host makes a
`RoundRecord` of it, with what it knows of the request. Rounds in which nobody asks keep nothing.
"""

import math
from typing import NamedTuple

import torch

from sglang_smc.options.request import RequestConfig
from sglang_smc.requests.open_token import Phase
from sglang_smc.requests.state import RequestState, state_of
from sglang_smc.round.batch import RoundBatch
from sglang_smc.round.decision import Decision, Drafts
from sglang_smc.state.population import Population
from sglang_smc.view.record import RoundRecord

_NO_TOKEN = -1


class Traced(NamedTuple):
    """One round of the G requests of a batch; places beyond a request's own N mean nothing."""

    begins: list[bool]  # of each request: it is its first round behind a prefill
    resized_from: torch.Tensor | None  # [G, N] where N has changed for some request
    num_particles: torch.Tensor  # [G]
    first_tokens: torch.Tensor  # [G, N] the token before each tail as the round begins
    log_weights_before: torch.Tensor  # [G, N]
    log_potentials: torch.Tensor | None  # [G, N] where some request has any
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
        """The record of one request's round, on the host.

        Args:
            group: the request's place in the batch.
            state: with the records of its rounds so far.
            emitted: tokens that SGLang's books have of the round.
            log_evidence: log Z-hat by the end of it.
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
            emitted_before=state.untold if self.begins[group] else [],
            begins=begins,
            resized_from=self._resized_from(group, state, size),
            log_weights_before=_finite(before),
            drafted=_cut_to(self.drafted[group], self.num_drafted[group, :size]),
            kept=self.num_kept[group, :size].tolist(),
            log_weights=_finite(weighed),
            log_potentials=None if potentials is None else _finite(potentials),
            ess=float(self.ess[group].nan_to_num(0.0)),
            log_block_evidence=gain if math.isfinite(gain) else None,
            cut=self._cut(group, config, ancestors),
            resampled=bool(self.resampled[group]),
            ancestors=ancestors,
            bonus=[None if one == _NO_TOKEN else one for one in self.bonus[group, :size].tolist()],
            ended=self.ended[group, :size].tolist(),
            narrowed_to=None if narrowed_to == list(range(size)) else narrowed_to,
            log_weights_after=_finite(self.log_weights_after[group, :size]),
            log_evidence=log_evidence if knows_evidence and math.isfinite(log_evidence) else None,
            emitted=[*self._settled(group, state, begins), *emitted],
        )

    def _resized_from(self, group: int, state: RequestState, size: int) -> list[int] | None:
        """Who each particle was, where the record before has another number of them."""
        if self.begins[group] or not state.rounds or len(state.rounds[-1].ancestors) == size:
            return None
        assert self.resized_from is not None, "N changes by a resizing step alone"
        return self.resized_from[group, :size].tolist()

    def _settled(self, group: int, state: RequestState, begins: list[int] | None) -> list[int]:
        """The first token, where particles differed in it and have come to agree in this round.

        Where they began with one token it counts as emitted with that.
        """
        if state.open_token.phase is not Phase.SETTLED:
            return []
        if begins is None:
            begins = next(one.begins for one in reversed(state.rounds) if one.begins is not None)
        return [] if len(set(begins)) == 1 else [state.open_token.settled]

    def _cut(self, group: int, config: RequestConfig, ancestors: list[int]) -> str:
        """Why the round kept no more."""
        if self.failure[group] > 0:
            return "failure"
        drafted, kept = self.num_drafted[group], self.num_kept[group]
        if not config.weighs:
            winner = ancestors[0]
            return "none" if kept[winner] >= drafted[winner] else "verification"
        size = len(ancestors)
        if bool((kept[:size] >= drafted[:size]).all()):
            return "none"
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
    """What there is to tell of a round, on the device.

    Args:
        begun: as it began.
        before: the same with what potentials have said by then.
        extended: with the drafts that are kept, handed down.
        continued: behind the bonus token.
        narrowed: as it ends, but for what is emitted.
        narrowed_to: ``[G, N]`` whom each has become a copy of there.
        resized_from: ``[G, N]`` likewise, as N changed before the round.
    """
    # A group that was stopped has no tails, and no bonus tokens.
    took_bonus = ~extended.ended & (continued.lengths == extended.lengths + 1)
    return Traced(
        begins=[state_of(req).take_start() for req in batch.reqs],
        resized_from=resized_from,
        num_particles=before.present.sum(1),
        first_tokens=before.last_emitted,
        log_weights_before=begun.log_weights,
        log_potentials=None if before.judged is None else _gains(begun, before),
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
    """What potentials have added to log-weights, ``[G, N]``: nothing to those of the dead."""
    lives = begun.log_weights > -torch.inf
    return torch.where(lives, before.log_weights - begun.log_weights, 0.0)


def _finite(values: torch.Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _cut_to(tokens: torch.Tensor, counts: torch.Tensor) -> list[list[int]]:
    """The first ``counts[n]`` of each row of ``tokens`` ``[N, K]``."""
    rows = zip(tokens.tolist(), counts.tolist(), strict=False)
    return [row[:count] for row, count in rows]
