"""Trace a round for requests that set ``trace``.

The round's tensors are kept on the device and copied with its result; the host makes a
`TracedRound` of them. Rounds without a request that sets ``trace`` keep nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_smc.models.chains import Chains
from sglang_smc.options.request import RequestConfig
from sglang_smc.round.extras import Extra, ReadRound, Stages
from sglang_smc.state.metrics import finite
from sglang_smc.state.request import RequestState, state_of
from sglang_smc.state.trace import TracedRound


class ReturnedTrace(Extra):
    """The steps of a round, of which the host writes a `TracedRound` per request."""

    name = "trace"

    def emit(self, rows: torch.Tensor, chains: Chains, stages: Stages | None) -> "TracedStages":
        """Return the round without distributions."""
        assert stages is not None, "asked for by a request"
        drafts = stages.drafts._replace(q=None, measured_q=None)
        begins = [state_of(req).take_start() for req in chains.reqs]
        return TracedStages(stages._replace(drafts=drafts), begins)

    def deliver(self, found: "TracedStages", read: ReadRound) -> None:
        """Add the round to the traces of requests that ask for one."""
        for group, req in enumerate(read.reqs):
            state = state_of(req)
            if read.live[group] and state.config.trace:
                log_evidence = read.totals[group][-1]
                traced = found.traced_round(group, state, read.emitted[group], log_evidence)
                state.rounds.append(traced)


class TracedStages(NamedTuple):
    """Hold a round for its traces."""

    stages: Stages
    begins: Sequence[bool]  # whether it is each request's first after a prefill

    def traced_round(
        self, group: int, state: RequestState, emitted: list[int], log_evidence: float
    ) -> TracedRound:
        """Return the trace of one request's round, on the host.

        Args:
            state: with its rounds so far.
            emitted: tokens of the round in SGLang's lists.
            log_evidence: log Z-hat at the end of the round.
        """
        stages = self.stages
        size = int(stages.revalued.present[group].sum())

        def of(values: torch.Tensor) -> torch.Tensor:
            return values[group, :size]

        begins = of(stages.revalued.last_emitted).tolist() if self.begins[group] else None
        ancestors = of(stages.decision.ancestors).tolist()
        weighed = of(stages.decision.weighed)
        narrowed_to = of(stages.end.ancestors).tolist()
        potentials = None
        before = base = of(stages.start.log_weights)
        if stages.revalued.scores is not None and state.potentials:
            base = of(stages.revalued.log_weights)
            potentials = torch.where(before > -torch.inf, base - before, 0.0)
            base = before + potentials
        gain = float(weighed.logsumexp(0) - base.logsumexp(0))
        # A stopped group has no tails, and no bonus tokens.
        length = of(stages.extended.lengths) + 1
        took_bonus = ~of(stages.extended.ended) & (of(stages.continued.lengths) == length)
        bonus = zip(took_bonus.tolist(), of(stages.continued.last_tokens).tolist(), strict=True)
        counts = of(stages.drafts.up_to_end).sum(1).tolist()
        drafted = zip(stages.drafts.tokens[group].tolist(), counts, strict=False)
        config = state.config
        knows_evidence = (config.weighs or config.is_exact) and not state.has_lost_tails
        return TracedRound(
            emitted_before=state.untraced if self.begins[group] else [],
            begins=begins,
            resized_from=self._resized_from(group, state, size),
            log_weights_before=_finite(before),
            drafted=[tokens[:count] for tokens, count in drafted],
            kept=of(stages.decision.num_kept).tolist(),
            log_weights=_finite(weighed),
            log_potentials=None if potentials is None else _finite(potentials),
            ess=float(stages.decision.ess[group].nan_to_num(0.0)),
            log_block_evidence=finite(gain),
            cut=self._cut(group, config, ancestors),
            resampled=bool(stages.decision.resampled[group]),
            ancestors=ancestors,
            bonus=[token if took else None for took, token in bonus],
            ended=of(stages.continued.ended).tolist(),
            narrowed_to=None if narrowed_to == list(range(size)) else narrowed_to,
            log_weights_after=_finite(of(stages.end.population.log_weights)),
            log_evidence=finite(log_evidence) if knows_evidence else None,
            emitted=[*self._closed_token(state, begins), *emitted],
        )

    def _resized_from(self, group: int, state: RequestState, size: int) -> list[int] | None:
        """Return the earlier particle of each, if the round before has another number of them."""
        if self.begins[group] or not state.rounds or len(state.rounds[-1].ancestors) == size:
            return None
        assert self.stages.resized_from is not None, "N changes by a resizing step alone"
        return self.stages.resized_from[group, :size].tolist()

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
        if self.stages.failure[group] > 0:
            return "failure"
        decision = self.stages.decision
        drafted = self.stages.drafts.up_to_end[group].sum(1)
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
