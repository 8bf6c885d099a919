"""Count rounds, and report them: `meta_info`, totals, Prometheus metrics, log lines, warnings.

Counters of requests are on the device (`CounterTable`). They are copied to the host with a round's
result, so `Monitor` does not read the device.

The effective sample size is the measure of quality: SMC keeps every draft token by construction,
so its accept length measures speed, not fidelity to the target.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_smc.ops.interface import Ops
from sglang_smc.options.policy import DIALED, Dial
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.weighing import BlockCut
from sglang_smc.state.fidelity import AnswerFidelity, FidelityWindows, Sums

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

logger = logging.getLogger(__name__)

META_PREFIX = "spec_smc_"

LOW_ESS = 0.15
"""Bound of the mean (ESS - 1) / (N - 1) below which a warning is logged.

The pair of bench/results/fidelity, though a hard one, has 0.35 to 0.53 at all settings. At 0.15 two
particles of 8 carry all weight. ESS / N itself is unsuitable: it is never below 1 / N.
"""

LOW_ESS_ROUNDS = 1000
"""Rounds over which the mean is taken, so that one unusual prompt causes no warning."""

LOW_ESS_SECONDS = 600.0
"""Seconds between two warnings: the remedy is a restart, so more would add nothing."""


class Counters(NamedTuple):
    """Running totals of the G requests in a batch, each ``[G]`` float64.

    Sums come first, then a minimum, then values that each round replaces.
    """

    rounds_ct: torch.Tensor
    resample_ct: torch.Tensor
    narrow_ct: torch.Tensor  # rounds in which the lag bound dropped particles
    all_zero_ct: torch.Tensor  # rounds in which every particle died
    nan_ct: torch.Tensor  # rounds, prefill included, with logits that gave no distribution
    exact_ct: torch.Tensor  # rounds with kept tokens from exact verification
    killed_ct: torch.Tensor  # particles that had no child at a resampling
    ess_sum: torch.Tensor
    particles_sum: torch.Tensor  # N of its rounds, which varies if the server adapts to its load
    steps_sum: torch.Tensor
    ess_min: torch.Tensor
    ancestors: torch.Tensor  # initial particles with descendants, before the final draw
    # By `smc.fidelity`, of the first particle's sequence; at the end all particles share one.
    tilt_sum: torch.Tensor
    tilt_information: torch.Tensor
    innovation_sum: torch.Tensor
    watched_ct: torch.Tensor
    log_evidence: torch.Tensor


_FIDELITY = Counters._fields.index(NAMES[0])


def zero_counters(num_particles: int) -> list[float]:
    """Return the totals of a request before its first round, when its particles are equal."""
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
        """Start from ``carried`` ``[G, len(Counters)]``: zeros, or totals before a retraction."""
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
        """Count one round; all arguments are ``[G]`` except ``fidelity``, ``[G, 4]``.

        Returns:
            The totals ``[G, len(Counters)]``.
        """
        ess = cut.ess.nan_to_num(0.0)  # NaN would stay in all later sums
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
    """Return the fidelity sums of totals: ``[G, len(Counters)]`` to ``[G, 4]``."""
    return totals[:, _FIDELITY : _FIDELITY + len(NAMES)]


def gained(before: list[float], after: list[float]) -> Counters:
    """Return the increments of one request's totals in a round."""
    gains = (new - old for old, new in zip(before, after, strict=True))
    return Counters._make(gains)


def meta_info(totals: list[float], config: RequestConfig, num_replayed: int) -> dict[str, Any]:
    """Return the `meta_info` fields of one request.

    Args:
        totals: its row of `CounterTable`.
        config: its options.
        num_replayed: its rounds that replayed a CUDA graph, which the host counts.
    """
    counters = Counters._make(totals)
    rounds = int(counters.rounds_ct)
    fields = {
        "mode": config.mode,
        "num_particles": config.num_particles,
        "num_steps": config.num_steps,
        "evidence_threshold": config.effective_evidence_threshold
        if math.isfinite(config.effective_evidence_threshold)
        else None,
        # Smaller than its options where the server adapts to its load.
        "particles_mean": counters.particles_sum / rounds if rounds else config.num_particles,
        "steps_mean": counters.steps_sum / rounds if rounds else config.num_steps,
        "rounds_ct": rounds,
        "replayed_ct": num_replayed,
        "resample_ct": int(counters.resample_ct),
        "narrow_ct": int(counters.narrow_ct),
        # At temperature 0 any wrong draft token kills all particles, which is normal.
        "all_zero_ct": 0 if config.greedy else int(counters.all_zero_ct),
        "nan_ct": int(counters.nan_ct),
        "exact_ct": int(counters.exact_ct),
        # Before the first round the particles are equal.
        "ess_mean": counters.ess_sum / rounds if rounds else float(config.num_particles),
        "ess_min": counters.ess_min,
        "distinct_ancestors": int(counters.ancestors),
        **_fidelity(counters),
        # Modes that mix blocks kept by evidence with verified ones have no such estimate.
        "log_evidence": counters.log_evidence if config.weighs or config.is_exact else None,
    }
    return {META_PREFIX + name: value for name, value in fields.items()}


def _fidelity(counters: Counters) -> dict[str, Any]:
    """Return the fidelity fields of one sequence; None where no token was measured."""
    count, information = int(counters.watched_ct), float(counters.tilt_information)
    return {
        "tilt": float(counters.tilt_sum) / information if information else None,
        "tilt_information": information if count else None,
        "innovation": float(counters.innovation_sum) / count if count else None,
        "watched_ct": count,
    }


PREFIX = "sglang_spec_smc_"
"""Prefix of metric names, without SGLang's colon, which some scrapers get as an underscore.

Which of the two depends on the `Accept` header: prometheus_client 0.22 and later escapes names of
OpenMetrics' samples as if they were labels (prometheus/client_python, issue 1177).
"""

ESS_RATIO = "ess_ratio"
CHUNK_GAP = "chunk_gap_seconds"
CHUNK_TOKENS = "chunk_tokens"
POTENTIAL_WAIT = "potential_wait_seconds"


class Played(NamedTuple):
    """Results of one round for one request."""

    gained: Counters  # increments of its counters, as numbers
    weighs: bool  # whether its mode weighs particles
    num_kept: int  # columns
    num_emitted: int  # tokens
    replayed: bool  # by a captured CUDA graph
    is_greedy: bool  # temperature 0: one chain

    @property
    def is_weighed(self) -> bool:
        """Return whether the ESS is meaningful: weights of several particles, all of them finite.

        NaN logits give a NaN, which would spoil every sum.
        """
        has_rivals = self.weighs and bool(self.gained.particles_sum > 1)
        return has_rivals and math.isfinite(self.gained.ess_sum)

    @property
    def num_all_zero(self) -> Any:
        """Return the rounds in which every particle died; 0 at temperature 0."""
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


WEIGHED: dict[str, Callable[[Counters], Any]] = {
    "weighed_rounds": lambda gains: 1,
    "ess": lambda gains: gains.ess_sum,
    "of_particles": lambda gains: gains.particles_sum,
    "of_steps": lambda gains: gains.steps_sum,
    "ess_ratio": lambda gains: gains.ess_sum / gains.particles_sum,
    "free_share": lambda gains: (gains.ess_sum - 1) / (gains.particles_sum - 1),
}
"""Sums over the rounds in which the ESS is meaningful, for the log and its warning."""


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
    # At most the lag, 256 by default, and one round.
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
"""Name -> documentation, and the value for the sums of the newest answers."""


class Monitor:
    """Counters of all rounds, with their log lines and metrics: one per worker.

    Args:
        interval: batches between two log lines; SGLang's --decode-log-interval.
        now: a clock in seconds.
    """

    def __init__(self, interval: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._interval = interval
        self.dial = Dial()
        self._watched = FidelityWindows(now)
        self._sums = dict.fromkeys([*(total.name for total in TOTALS), *WEIGHED], 0.0)
        self._logged = self._tested = (
            self._sums
        )  # at the last log line; at the last test of the ESS
        self._num_batches = 0
        self._warned = -math.inf
        self._round: list[Played] = []
        self._prometheus: Prometheus | None = None
        self._is_silent = False

    def report_as(self, reporter: "SchedulerMetricsReporter") -> None:
        """Log on the ranks on which SGLang logs, and export metrics where SGLang does."""
        self._is_silent = not reporter.is_stats_logging_rank
        if reporter.current_scheduler_metrics_enabled and reporter.metrics_collector is not None:
            self._prometheus = Prometheus(reporter.metrics_collector)

    def add(self, played: Played) -> None:
        """Count one request's part of a round."""
        self._round.append(played)

    def count_failed_prefill(self) -> None:
        """Count a request without any round, since its prefill gave unusable logits."""
        self._add({"nan_rounds": 1.0})

    def _add(self, sums: dict[str, float]) -> None:
        self._sums = self._sums | {name: self._sums[name] + sums[name] for name in sums}
        if self._prometheus is not None:
            self._prometheus.count(sums)

    def end_round(self) -> None:
        """Add the round's results to totals, metrics and log."""
        weighed = [played.gained for played in self._round if played.is_weighed]
        of_weighed = {name: float(sum(map(of, weighed))) for name, of in WEIGHED.items()}
        self._add({total.name: sum(map(total.of, self._round)) for total in TOTALS} | of_weighed)
        self._round = []
        if self._prometheus is not None:
            for gains in weighed:
                self._prometheus.observe(ESS_RATIO, gains.ess_sum / gains.particles_sum)
        self._num_batches += 1
        if self._is_silent:
            return
        if self._num_batches % self._interval == 0:
            self._write_log()
        self._warn_of_low_ess()

    def _write_log(self) -> None:
        new, self._logged = _differences(self._logged, self._sums), self._sums
        ess = f"{new['ess'] / new['of_particles']:.2f}" if new["of_particles"] else "-"
        logger.info(
            "SMC, #round: %d, ess / particles: %s, resample rate: %.2f, "
            "#narrowed: %d, #all-zero: %d, #nan: %d, tilt: %s",
            new["rounds"],
            ess,
            new["resamplings"] / max(new["rounds"], 1),
            new["narrowed_rounds"],
            new["all_zero_rounds"],
            new["nan_rounds"],
            self._watched.all,
        )

    def _warn_of_low_ess(self) -> None:
        """Warn, with advice, where few particles carry nearly all the weight."""
        new = _differences(self._tested, self._sums)
        count = new["weighed_rounds"]
        if count < LOW_ESS_ROUNDS:
            return
        self._tested = self._sums
        if new["free_share"] / count >= LOW_ESS or self._now() < self._warned + LOW_ESS_SECONDS:
            return
        self._warned = self._now()
        logger.warning(
            "The effective sample size is low: %.1f of %.1f particles, with %.1f tokens drafted a "
            "round, over the last %d rounds. The draft misses what the target would say, so "
            "answers may be far from the target's. Any of these helps: --speculative-smc-mode auto "
            "(or exact, which is lossless); a smaller --speculative-num-steps; "
            "--speculative-smc-resample-at token; a larger --speculative-smc-num-particles; "
            "another --speculative-draft-model-path. A request may choose all but the last in "
            "custom_params.",
            new["ess"] / count,
            new["of_particles"] / count,
            new["of_steps"] / count,
            count,
        )

    def end_answer(self, answer: AnswerFidelity) -> None:
        """Add the measurements of an answer that has ended."""
        warning = self._watched.add(answer)
        if answer.mode in DIALED:
            threshold, pull = answer.evidence_threshold, answer.tilt_sum
            self.dial.learn(threshold, pull, answer.tilt_information)
        if self._prometheus is not None:
            self._prometheus.show(self._watched.all)
        if warning is not None and not self._is_silent:
            logger.warning("%s", warning)

    def fidelity(self) -> dict[str, dict[str, Any]]:
        """Return the fidelity fields of the newest answers, by mode and over all."""
        return self._watched.as_dict()

    def time_chunk(self, last: float | None, num_tokens: int) -> float:
        """Observe a chunk of tokens that a stream sends.

        Args:
            last: the time of the chunk before, None for the first: that time is the TTFT.
            num_tokens: number of new tokens, at least 1.

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
        """Observe the seconds that a round waited for a potential's values."""
        if self._prometheus is not None:
            self._prometheus.observe(POTENTIAL_WAIT, seconds)

    def totals(self) -> dict[str, Any]:
        """Return sums since the start, and means over them; a mean over nothing is None."""
        sums = {total.name: int(self._sums[total.name]) for total in TOTALS}
        weighed = int(self._sums["weighed_rounds"])
        return {
            **sums,
            "mean_particles": _mean(sums["particles"], sums["rounds"]),
            "mean_steps": _mean(sums["drafted_columns"], sums["rounds"]),
            "mean_kept_columns": _mean(sums["kept_columns"], sums["rounds"]),
            "mean_emitted_tokens": _mean(sums["emitted_tokens"], sums["rounds"]),
            "weighed_rounds": weighed,
            "mean_ess_ratio": _mean(self._sums["ess_ratio"], weighed),
        }


class Prometheus:
    """SMC's metrics, with the labels of the scheduler's own metrics.

    Args:
        collector: SGLang's, which gives the metric classes and labels.
    """

    def __init__(self, collector: "SchedulerMetricsCollector") -> None:
        # Imported late: the client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        counter, histogram = (
            collector._counter_cls or Counter,
            collector._histogram_cls or Histogram,
        )
        self._gauge = collector._gauge_cls or Gauge
        self._labels = labels = collector.labels
        self._gauges: dict[str, Any] = {}
        # A metric is exported from the start, as 0, once it has its labels.
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
            if value and name in self._counters:
                self._counters[name].inc(value)

    def show(self, sums: Sums) -> None:
        """Set the gauges to the answers' values; a gauge is created with its first value."""
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


def _differences(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items()}


def _mean(total: Any, count: int) -> float | None:
    return total / count if count else None
