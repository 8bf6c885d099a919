"""Trace a round for requests that set ``trace``.

The round's tensors are kept on the device and copied with its result; the host makes a
`TracedRound` of them. Rounds without a request that sets ``trace`` keep nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.deciding import Drafts
from sglang_smc.smc.population import Narrowed, Population
from sglang_smc.smc.weighing import Decision
from sglang_smc.state.metrics import finite
from sglang_smc.state.request import RequestState, state_of
from sglang_smc.state.trace import TracedRound


class Stages(NamedTuple):
    """Hold what the steps of a round return; places beyond a request's own N are undefined."""

    resized_from: torch.Tensor | None  # [G, N] ancestors, where N has changed for some request
    start: Population  # at the start
    revalued: Population  # at the start, with the latest potential values
    drafts: Drafts
    decision: Decision
    failure: torch.Tensor  # [G] int64 `Failure`
    extended: Population  # with the kept draft tokens, after resampling
    continued: Population  # after the bonus token
    end: Narrowed
    begins: Sequence[bool] = ()  # of a trace: whether it is each request's first after a prefill

    def traced(self, reqs: Sequence[Req]) -> "Stages":
        """Return the round for a trace, without distributions."""
        drafts = self.drafts._replace(q=None, measured_q=None)
        return self._replace(drafts=drafts, begins=[state_of(req).take_start() for req in reqs])

    def traced_round(
        self, group: int, state: RequestState, emitted: list[int], log_evidence: float
    ) -> TracedRound:
        """Return the trace of one request's round, on the host.

        Args:
            state: with its rounds so far.
            emitted: tokens of the round in SGLang's lists.
            log_evidence: log Z-hat at the end of the round.
        """
        size = int(self.revalued.present[group].sum())

        def of(values: torch.Tensor) -> torch.Tensor:
            return values[group, :size]

        begins = of(self.revalued.last_emitted).tolist() if self.begins[group] else None
        ancestors = of(self.decision.ancestors).tolist()
        weighed = of(self.decision.weighed)
        narrowed_to = of(self.end.ancestors).tolist()
        potentials = None
        before = base = of(self.start.log_weights)
        if self.revalued.scores is not None and state.potentials:
            base = of(self.revalued.log_weights)
            potentials = torch.where(before > -torch.inf, base - before, 0.0)
            base = before + potentials
        gain = float(weighed.logsumexp(0) - base.logsumexp(0))
        # A stopped group has no tails, and no bonus tokens.
        length = of(self.extended.lengths) + 1
        took_bonus = ~of(self.extended.ended) & (of(self.continued.lengths) == length)
        bonus = zip(took_bonus.tolist(), of(self.continued.last_tokens).tolist(), strict=True)
        counts = of(self.drafts.up_to_end).sum(1).tolist()
        drafted = zip(self.drafts.tokens[group].tolist(), counts, strict=False)
        config = state.config
        knows_evidence = (config.weighs or config.is_exact) and not state.has_lost_tails
        return TracedRound(
            emitted_before=state.untraced if self.begins[group] else [],
            begins=begins,
            resized_from=self._resized_from(group, state, size),
            log_weights_before=_finite(before),
            drafted=[tokens[:count] for tokens, count in drafted],
            kept=of(self.decision.num_kept).tolist(),
            log_weights=_finite(weighed),
            log_potentials=None if potentials is None else _finite(potentials),
            ess=float(self.decision.ess[group].nan_to_num(0.0)),
            log_block_evidence=finite(gain),
            cut=self._cut(group, config, ancestors),
            resampled=bool(self.decision.resampled[group]),
            ancestors=ancestors,
            bonus=[token if took else None for took, token in bonus],
            ended=of(self.continued.ended).tolist(),
            narrowed_to=None if narrowed_to == list(range(size)) else narrowed_to,
            log_weights_after=_finite(of(self.end.population.log_weights)),
            log_evidence=finite(log_evidence) if knows_evidence else None,
            emitted=[*self._closed_token(state, begins), *emitted],
        )

    def _resized_from(self, group: int, state: RequestState, size: int) -> list[int] | None:
        """Return the earlier particle of each, if the round before has another number of them."""
        if self.begins[group] or not state.rounds or len(state.rounds[-1].ancestors) == size:
            return None
        assert self.resized_from is not None, "N changes by a resizing step alone"
        return self.resized_from[group, :size].tolist()

    def _closed_token(self, state: RequestState, begins: list[int] | None) -> list[int]:
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
        decision = self.decision
        drafted = self.drafts.up_to_end[group].sum(1)
        kept = decision.num_kept[group]
        if not config.weighs:
            winner = ancestors[0]
            return "none" if kept[winner] >= drafted[winner] else "verification"
        if bool((kept >= drafted)[: len(ancestors)].all()):
            return "none"
        if config.extends:
            return "verification"
        if config.resample_at == "token" and bool(decision.resampled[group]) and bool(kept.any()):
            return "ess"
        return "dead" if bool(decision.all_zero[group]) else "evidence"


def _finite(values: torch.Tensor) -> list[float | None]:
    return [finite(value) for value in values.tolist()]
