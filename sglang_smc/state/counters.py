"""What a request's run says about itself: counters on the device, `meta_info` for the client.

The effective sample size is the signal of quality: SMC keeps every drafted token
by construction, so its accept length says how fast it is, not how faithful.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_smc.ops.interface import Ops
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.rounds import BlockCut

logger = logging.getLogger(__name__)

META_PREFIX = "spec_smc_"

LOW_ESS = 0.15
"""Of what N particles can add to one, (ESS - 1) / (N - 1): less than this is worth a warning.

The pair of bench/results/fidelity, hard as it is, has 0.35 to 0.53 at all settings. At 0.15 two
particles of 8 carry all weight. ESS / N itself would not do: it is never below 1 / N.
"""

LOW_ESS_ROUNDS = 1000
"""Rounds that the mean is taken over, so that one odd prompt warns nobody."""

LOW_ESS_SECONDS = 600.0
"""Between two warnings: what they ask for is a restart, so more often tells nothing new."""


class Counters(NamedTuple):
    """Running totals of the G requests in a batch, each ``[G]`` float64.

    Sums come first, then what is a minimum, then what a round says anew.
    """

    rounds_ct: torch.Tensor
    resample_ct: torch.Tensor
    narrow_ct: torch.Tensor  # rounds in which particles went for the lag bound's sake
    all_zero_ct: torch.Tensor  # rounds in which every particle died
    nan_ct: torch.Tensor  # rounds, prefill included, whose logits gave no law to go by
    exact_ct: torch.Tensor  # rounds in which exact verification had the last word
    killed_ct: torch.Tensor  # particles that had no child at a resampling
    ess_sum: torch.Tensor
    particles_sum: torch.Tensor  # that its rounds had, which adapts to the load if the server does
    steps_sum: torch.Tensor
    ess_min: torch.Tensor
    ancestors: torch.Tensor  # particles of the start with descendants, before the final draw
    # By `smc.fidelity`, of the first particle's text; as it ends, all have one.
    tilt_sum: torch.Tensor
    tilt_information: torch.Tensor
    innovation_sum: torch.Tensor
    watched_ct: torch.Tensor
    log_evidence: torch.Tensor


_FIDELITY = Counters._fields.index(NAMES[0])


def zero_counters(num_particles: int) -> list[float]:
    """The totals of a request before its first round, when its particles are equal."""
    start = dict.fromkeys(Counters._fields, 0.0)
    return list((start | {"ess_min": num_particles, "ancestors": num_particles}).values())


class CounterTable:
    """Counters of all requests that hold a row of SGLang's request pool."""

    def __init__(self, num_rows: int, device: str, ops: Ops) -> None:
        shape = (num_rows, len(Counters._fields))
        self._values = torch.zeros(shape, dtype=torch.float64, device=device)
        self._one = torch.ones(1, dtype=torch.float64, device=device)
        self._ops = ops

    def begin(self, rows: torch.Tensor, carried: torch.Tensor) -> None:
        """Start from ``carried`` ``[G, len(Counters)]``: nothing, or what a retracted run had."""
        self._values[rows] = carried

    def add_round(
        self,
        rows: torch.Tensor,
        *,
        cut: BlockCut,
        failed: torch.Tensor,
        verified: torch.Tensor,
        killed: torch.Tensor,
        narrowed: torch.Tensor,
        ancestors: torch.Tensor,
        num_particles: torch.Tensor,
        num_steps: torch.Tensor,
        fidelity: torch.Tensor,
        log_evidence: torch.Tensor,
    ) -> torch.Tensor:
        """Count one round, all arguments ``[G]`` but for ``fidelity``, ``[G, 4]``.

        Returns:
            The totals ``[G, len(Counters)]``.
        """
        ess = cut.ess.nan_to_num(0.0)  # NaN would stay in all sums to come
        return self._ops.tally(
            self._values,
            rows,
            added=(
                self._one.expand_as(rows),
                cut.resample,
                narrowed,
                cut.all_zero,
                failed,
                verified,
                killed,
                ess,
                num_particles,
                num_steps,
            ),
            lowest=ess,
            latest=(ancestors, *fidelity.unbind(1), log_evidence),
        )


def fidelity_of(totals: torch.Tensor) -> torch.Tensor:
    """What texts were watched to be, of their totals: ``[G, len(Counters)]`` to ``[G, 4]``."""
    return totals[:, _FIDELITY : _FIDELITY + len(NAMES)]


def gained(before: list[float], after: list[float]) -> Counters:
    """What one request's totals gained in a round."""
    gains = (new - old for old, new in zip(before, after, strict=True))
    return Counters._make(gains)


def meta_info(totals: list[float], config: RequestConfig, num_replayed: int) -> dict[str, Any]:
    """The `meta_info` fields of one request.

    Args:
        totals: its row of `CounterTable`.
        config: what it asked for.
        num_replayed: its rounds that replayed a graph, which the host counts.
    """
    counters = Counters._make(totals)
    rounds = int(counters.rounds_ct)
    fields = {
        "mode": config.mode,
        "num_particles": config.num_particles,
        "num_steps": config.num_steps,
        "evidence_threshold": config.covering if math.isfinite(config.covering) else None,
        # Fewer than it asked for where the server adapts to its load.
        "particles_mean": counters.particles_sum / rounds if rounds else config.num_particles,
        "steps_mean": counters.steps_sum / rounds if rounds else config.num_steps,
        "rounds_ct": rounds,
        "replayed_ct": num_replayed,
        "resample_ct": int(counters.resample_ct),
        "narrow_ct": int(counters.narrow_ct),
        # At temperature 0 any wrong draft dies, which says nothing of the pair.
        "all_zero_ct": 0 if config.greedy else int(counters.all_zero_ct),
        "nan_ct": int(counters.nan_ct),
        "exact_ct": int(counters.exact_ct),
        # Before the first round the particles are equal.
        "ess_mean": counters.ess_sum / rounds if rounds else float(config.num_particles),
        "ess_min": counters.ess_min,
        "distinct_ancestors": int(counters.ancestors),
        **_fidelity(counters),
        # Blocks kept by their evidence are not weighed against those that are verified.
        "log_evidence": counters.log_evidence if config.weighs or config.is_exact else None,
    }
    return {META_PREFIX + name: value for name, value in fields.items()}


def _fidelity(counters: Counters) -> dict[str, Any]:
    """How far the text is from the target's law; None where nothing of it was watched."""
    count, information = int(counters.watched_ct), float(counters.tilt_information)
    return {
        "tilt": float(counters.tilt_sum) / information if information else None,
        "tilt_information": information if count else None,
        "innovation": float(counters.innovation_sum) / count if count else None,
        "watched_ct": count,
    }


class IntervalLog:
    """One log line per interval with the effective sample size and the resampling rate.

    Args:
        interval: rounds of the server between two lines; SGLang's --decode-log-interval.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._begin()

    def _begin(self) -> None:
        self._num_batches, self._sums = 0, [0.0] * len(Counters._fields)
        self._ess, self._particles, self._failed_prefills = 0.0, 0.0, 0

    def add(self, gains: Counters, *, is_weighed: bool) -> None:
        """Count what one request's totals gained in a round, whose weights may mean nothing."""
        self._sums = [total + gain for total, gain in zip(self._sums, gains, strict=True)]
        if is_weighed:
            self._ess += gains.ess_sum
            self._particles += gains.particles_sum

    def add_failed_prefill(self) -> None:
        """Count a request that had no round, since its prefill gave unusable logits."""
        self._failed_prefills += 1

    def end_round(self, tilt: str) -> None:
        """Write the line, and begin again, at each interval's end.

        Args:
            tilt: of the last answers.
        """
        self._num_batches += 1
        if self._num_batches < self._interval:
            return
        sums = Counters._make(self._sums)
        rounds = max(sums.rounds_ct, 1)
        logger.info(
            "SMC, #round: %d, ess / particles: %s, resample rate: %.2f, "
            "#narrowed: %d, #all-zero: %d, #nan: %d, tilt: %s",
            sums.rounds_ct,
            f"{self._ess / self._particles:.2f}" if self._particles else "-",
            sums.resample_ct / rounds,
            sums.narrow_ct,
            sums.all_zero_ct,
            sums.nan_ct + self._failed_prefills,
            tilt,
        )
        self._begin()


class LowESSWarning:
    """Warns, with advice, where weights stay so uneven that few particles count.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._not_before = -float("inf")
        self._begin()

    def _begin(self) -> None:
        self._num_rounds, self._shares, self._ess, self._particles, self._steps = 0, 0.0, 0.0, 0, 0

    def add(self, gains: Counters) -> None:
        """Count a round of a request that weighs more than one particle."""
        self._num_rounds += 1
        self._shares += (gains.ess_sum - 1) / (gains.particles_sum - 1)
        self._ess += gains.ess_sum
        self._particles += gains.particles_sum
        self._steps += gains.steps_sum
        if self._num_rounds == LOW_ESS_ROUNDS:
            self._judge()
            self._begin()

    def _judge(self) -> None:
        if self._shares / self._num_rounds >= LOW_ESS or self._now() < self._not_before:
            return
        self._not_before = self._now() + LOW_ESS_SECONDS
        logger.warning(
            "The effective sample size is low: %.1f of %.1f particles, with %.1f tokens drafted a "
            "round, over the last %d rounds. The draft misses what the target would say, so "
            "answers may be far from the target's. Any of these helps: --speculative-smc-mode auto "
            "(or exact, which is lossless); a smaller --speculative-num-steps; "
            "--speculative-smc-resample-at token; a larger --speculative-smc-num-particles; "
            "another --speculative-draft-model-path. A request may choose all but the last in "
            "custom_params.",
            self._ess / self._num_rounds,
            self._particles / self._num_rounds,
            self._steps / self._num_rounds,
            self._num_rounds,
        )
