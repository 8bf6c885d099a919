"""What a running server tells its operator: totals, Prometheus metrics, log lines, warnings.

The counters of a round travel to the host with its result, so nothing here reads the device.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smc.options.dial import DIALED, Dial
from sglang_smc.state.counters import Counters, IntervalLog, LowESSWarning
from sglang_smc.state.watched import Answer, Sums, Watched

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

logger = logging.getLogger(__name__)

PREFIX = "sglang_spec_smc_"
"""Without SGLang's colon, which some scrapers get as it is and others as an underscore.

Which of the two depends on the `Accept` header: prometheus_client 0.22 and later escapes names of
OpenMetrics' samples as if they were labels (prometheus/client_python, issue 1177).
"""

ESS_RATIO = "ess_ratio"
CHUNK_GAP = "chunk_gap_seconds"
CHUNK_TOKENS = "chunk_tokens"
POTENTIAL_WAIT = "potential_wait_seconds"


class Played(NamedTuple):
    """What one round did for one request."""

    gained: Counters  # what its counters gained, as numbers
    weighs: bool  # whether that is what it asked for
    num_kept: int  # columns
    num_emitted: int  # tokens
    replayed: bool  # by a recorded graph
    is_greedy: bool  # temperature 0: one chain

    @property
    def is_weighed(self) -> bool:
        """Whether its weights were there to be uneven: one particle has no rival.

        Nor have weights of logits that are NaN any size, and one such would spoil every sum.
        """
        has_rivals = self.weighs and bool(self.gained.particles_sum > 1)
        return has_rivals and math.isfinite(self.gained.ess_sum)

    @property
    def num_all_zero(self) -> Any:
        """Rounds in which every particle died; at temperature 0 any wrong draft does."""
        return 0.0 if self.is_greedy else self.gained.all_zero_ct


class Total(NamedTuple):
    """A sum over all rounds of all requests since the server's start."""

    name: str
    documentation: str
    of: Callable[[Played], Any]  # a number


TOTALS = (
    Total("rounds", "Rounds, counted for each request.", lambda r: r.gained.rounds_ct),
    Total("particles", "Particles that rounds had.", lambda r: r.gained.particles_sum),
    Total("drafted_columns", "Tokens drafted by each particle.", lambda r: r.gained.steps_sum),
    Total("kept_columns", "Drafted columns that rounds kept.", lambda r: r.num_kept),
    Total("emitted_tokens", "Tokens that rounds emitted.", lambda r: r.num_emitted),
    Total("silent_rounds", "Rounds that emitted nothing.", lambda r: r.num_emitted == 0),
    Total("replayed_rounds", "Rounds that replayed a recorded graph.", lambda r: r.replayed),
    Total("resamplings", "Rounds that resampled.", lambda r: r.gained.resample_ct),
    Total(
        "killed_particles",
        "Particles that had no descendant after a resampling.",
        lambda r: r.gained.killed_ct,
    ),
    Total(
        "narrowed_rounds",
        "Rounds in which the lag bound drew among particles' oldest tokens.",
        lambda r: r.gained.narrow_ct,
    ),
    Total(
        "exact_rounds",
        "Rounds in which exact verification had the last word.",
        lambda r: r.gained.exact_ct,
    ),
    Total(
        "all_zero_rounds",
        "Rounds in which every particle died, but for those of greedy requests.",
        lambda r: r.num_all_zero,
    ),
    Total(
        "nan_rounds",
        "Rounds, prefill included, that ended a request by unusable logits.",
        lambda r: r.gained.nan_ct,
    ),
)


class Measure(NamedTuple):
    """A histogram."""

    name: str
    documentation: str
    buckets: tuple[float, ...]


MEASURES = (
    Measure(
        ESS_RATIO,
        "ESS / N of each round and request in mode smc that has N > 1 and is not greedy.",
        (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
    ),
    Measure(
        CHUNK_GAP,
        "Seconds from one chunk of a stream with new tokens to the next.",
        (0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 60, 120),
    ),
    # Not more than the particles may lag behind, 256 at most by default, and one round.
    Measure(
        CHUNK_TOKENS,
        "New tokens of each chunk of a stream that has some.",
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    ),
    Measure(
        POTENTIAL_WAIT,
        "Seconds that a round, its drafts scored, waited for one potential's answers.",
        (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
    ),
)


GAUGES: dict[str, tuple[str, Callable[[Sums], float | None]]] = {
    "tilt": (
        "How far the last answers are from the target's law: 0 is the target, 1 about the draft.",
        lambda sums: sums.tilt,
    ),
    "tilt_error": ("Standard error of the tilt.", lambda sums: sums.tilt_error),
    "innovation": (
        "Mean of log p + H of tokens of the last answers, nats: 0 under the target's law.",
        lambda sums: sums.innovation,
    ),
}
"""Name -> what it says, and what it is of the last answers."""


class Monitor:
    """Counts what rounds do, and tells it: one for each worker.

    Args:
        interval: batches between two log lines; SGLang's --decode-log-interval.
        now: a clock in seconds.
    """

    def __init__(self, interval: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.dial = Dial()
        self._log = IntervalLog(interval)
        self._low_ess = LowESSWarning()
        self._watched = Watched(now)
        self._totals = dict.fromkeys((total.name for total in TOTALS), 0.0)
        self._ess_ratios = 0.0, 0  # their sum and number
        self._round: list[Played] = []
        self._prometheus: Prometheus | None = None
        self._is_silent = False

    def report_as(self, reporter: "SchedulerMetricsReporter") -> None:
        """Log on the ranks on which SGLang does, and export metrics where it does."""
        self._is_silent = not reporter.is_stats_logging_rank
        if reporter.current_scheduler_metrics_enabled and reporter.metrics_collector is not None:
            self._prometheus = Prometheus(reporter.metrics_collector)

    def add(self, played: Played) -> None:
        """Count one request's part of a round."""
        self._round.append(played)

    def count_failed_prefill(self) -> None:
        """Count a request whose prefill gave unusable logits, and which has no round."""
        self._totals["nan_rounds"] += 1
        self._log.add_failed_prefill()
        if self._prometheus is not None:
            self._prometheus.count({"nan_rounds": 1})

    def end_answer(self, answer: Answer) -> None:
        """Take in what was watched of an answer that has ended."""
        warning = self._watched.add(answer)
        if answer.mode in DIALED:
            threshold, pull = answer.evidence_threshold, answer.tilt_sum
            self.dial.learn(threshold, pull, answer.tilt_information)
        if self._prometheus is not None:
            self._prometheus.show(self._watched.all)
        if warning is not None and not self._is_silent:
            logger.warning("%s", warning)

    def fidelity(self) -> dict[str, dict[str, Any]]:
        """How far the last answers are from the target's law, by mode and of all."""
        return self._watched.as_dict()

    def time_chunk(self, last: float | None, num_tokens: int) -> float:
        """Measure tokens that a stream sends on.

        Args:
            last: the time of its chunk before, None for its first: that wait is its TTFT.
            num_tokens: that are new, at least 1.

        Returns:
            The time of this chunk.
        """
        now = self._now()
        if self._prometheus is not None:
            self._prometheus.observe(CHUNK_TOKENS, num_tokens)
            if last is not None:
                self._prometheus.observe(CHUNK_GAP, now - last)
        return now

    def time_potential(self, seconds: float) -> None:
        """Measure how long a round waited for a potential's answers."""
        if self._prometheus is not None:
            self._prometheus.observe(POTENTIAL_WAIT, seconds)

    def end_round(self) -> None:
        """Pass on what the round did for the requests of its batch."""
        sums = {total.name: sum(map(total.of, self._round)) for total in TOTALS}
        ratios = [r.gained.ess_sum / r.gained.particles_sum for r in self._round if r.is_weighed]
        self._totals = {name: self._totals[name] + sums[name] for name in sums}
        self._ess_ratios = self._ess_ratios[0] + sum(ratios), self._ess_ratios[1] + len(ratios)
        if self._prometheus is not None:
            self._prometheus.count(sums)
            for ratio in ratios:
                self._prometheus.observe(ESS_RATIO, ratio)
        if not self._is_silent:
            self._write_log()
        self._round = []

    def _write_log(self) -> None:
        for played in self._round:
            self._log.add(
                played.gained._replace(all_zero_ct=played.num_all_zero),
                is_weighed=played.is_weighed,
            )
            if played.is_weighed:
                self._low_ess.add(played.gained)
        self._log.end_round(str(self._watched.all))

    def totals(self) -> dict[str, Any]:
        """Sums since the start, and means over them; a mean of nothing is None."""
        sums = {name: int(value) for name, value in self._totals.items()}
        per_round = {
            "mean_particles": sums["particles"],
            "mean_steps": sums["drafted_columns"],
            "mean_kept_columns": sums["kept_columns"],
            "mean_emitted_tokens": sums["emitted_tokens"],
        }
        means = {name: _mean(value, sums["rounds"]) for name, value in per_round.items()}
        weighed = {
            "weighed_rounds": self._ess_ratios[1],
            "mean_ess_ratio": _mean(*self._ess_ratios),
        }
        return {**sums, **means, **weighed}


class Prometheus:
    """SMC's metrics, with the labels of the scheduler's own.

    Args:
        collector: SGLang's, whose metric classes and labels these share.
    """

    def __init__(self, collector: "SchedulerMetricsCollector") -> None:
        # Not earlier: the client reads PROMETHEUS_MULTIPROC_DIR as it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        counter, histogram = (
            collector._counter_cls or Counter,
            collector._histogram_cls or Histogram,
        )
        self._gauge = collector._gauge_cls or Gauge
        self._labels = labels = collector.labels
        self._gauges: dict[str, Any] = {}
        # A metric shows from the start, as 0, once it has its labels.
        self._counters = {
            total.name: counter(
                name=f"{PREFIX}{total.name}_total",
                documentation=total.documentation,
                labelnames=labels.keys(),
            ).labels(**labels)
            for total in TOTALS
        }
        self._histograms = {
            measure.name: histogram(
                name=PREFIX + measure.name,
                documentation=measure.documentation,
                labelnames=labels.keys(),
                buckets=measure.buckets,
            ).labels(**labels)
            for measure in MEASURES
        }

    def count(self, sums: Mapping[str, float]) -> None:
        """Add to the counters."""
        for name, value in sums.items():
            if value:
                self._counters[name].inc(value)

    def show(self, sums: Sums) -> None:
        """Set gauges to what answers say; there are none before they say anything."""
        for name, (documentation, of) in GAUGES.items():
            value = of(sums)
            if value is not None:
                if name not in self._gauges:
                    self._gauges[name] = self._gauge(
                        name=PREFIX + name,
                        documentation=documentation,
                        labelnames=self._labels.keys(),
                        multiprocess_mode="mostrecent",
                    ).labels(**self._labels)
                self._gauges[name].set(value)

    def observe(self, name: str, value: Any) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)


def _mean(total: Any, count: int) -> float | None:
    return total / count if count else None
