"""Count rounds, and report them: `meta_info`, totals, Prometheus metrics, log lines, warnings.

Counters of requests are on the device (`CounterTable`). They are copied to the host with a round's
result, so `Monitor` does not read the device.

The accept length measures speed. Fidelity to the target is measured by the tilt (`smc.fidelity`),
and, where particles are weighed, by the effective sample size.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from operator import sub
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

from sglang_smc.options.policy import Dial
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.ops import Ops
from sglang_smc.state.alarm import SPANS, UselessDrafts, span_of
from sglang_smc.state.fidelity import AnswerFidelity, FidelityWindows, Sums

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


_LOWEST = Counters._fields.index("ess_min")
_SUMS = Counters._fields[:_LOWEST]
_LATEST = Counters._fields[_LOWEST + 1 :]
_FIDELITY = Counters._fields.index(NAMES[0])
_NAN, _EXACT = map(Counters._fields.index, ("nan_ct", "exact_ct"))


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
        gains = [name in ("rounds_ct", "ess_sum", "particles_sum") for name in Counters._fields]
        self._plain = torch.tensor(gains, dtype=torch.float64, device=device)  # of a plain one
        self._ops = ops

    def begin(self, rows: torch.Tensor, carried: torch.Tensor) -> None:
        """Start from ``carried`` ``[G, len(Counters)]``: zeros, or totals before a retraction."""
        self._values[rows] = carried

    def add_round(
        self, rows: torch.Tensor, fidelity: torch.Tensor, **gains: torch.Tensor
    ) -> torch.Tensor:
        """Count one round.

        Args:
            rows: ``[G]`` of the requests.
            fidelity: ``[G, 4]`` the columns of `smc.fidelity.NAMES`.
            gains: the other fields of `Counters` but the first and ``ess_min``, each ``[G]``.

        Returns:
            The totals ``[G, len(Counters)]``.
        """
        ess = gains["ess_sum"].nan_to_num(0.0)  # NaN would stay in all later sums
        gains |= {"rounds_ct": self._one.expand_as(rows), "ess_sum": ess}
        gains |= dict(zip(NAMES, fidelity.unbind(1), strict=True))
        added, latest = ([gains[name] for name in names] for names in (_SUMS, _LATEST))
        return self._ops.tally(self._values, rows, added=added, lowest=ess, latest=latest)

    def add_plain_rounds(
        self,
        rows: torch.Tensor,
        failed: torch.Tensor,
        verified: torch.Tensor,
        played: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Count rounds of single particles without drafts, and return the totals.

        Args:
            failed, verified: ``[G]`` bool, whether the last one failed, for ``nan_ct``, and whether
                all were verified, for ``exact_ct``.
            played: ``[G]`` int64 rounds of each request; None: one.
        """
        plain = self._plain if played is None else played.unsqueeze(1) * self._plain
        totals = self._values.index_select(0, rows).add_(plain)
        totals[:, _NAN].add_(failed)
        totals[:, _EXACT].add_(verified if played is None else played * verified)
        totals[:, _LOWEST : _LOWEST + 2].clamp_max_(1)  # and the ancestors
        self._values.index_copy_(0, rows, totals)
        return totals


def fidelity_of(totals: torch.Tensor) -> torch.Tensor:
    """Return the fidelity sums of totals: ``[G, len(Counters)]`` to ``[G, 4]``."""
    return totals[:, _FIDELITY : _FIDELITY + len(NAMES)]


def gained(before: list[float], after: list[float]) -> Counters:
    """Return the increments of one request's totals in a round."""
    return Counters._make(map(sub, after, before))


def finite(value: float) -> float | None:
    """Return a number for JSON, which has no infinity: None in its place."""
    return value if math.isfinite(value) else None


def meta_info(totals: list[float], config: RequestConfig, num_replayed: int) -> dict[str, Any]:
    """Return the `meta_info` fields of one request.

    Args:
        totals: its row of `CounterTable`.
        num_replayed: its rounds that replayed a CUDA graph, which the host counts.
    """
    sums = Counters._make(totals)
    rounds = sums.rounds_ct
    information = sums.tilt_information
    watched = sums.watched_ct
    threshold = math.inf if config.branches else config.effective_evidence_threshold  # verified
    fields = {
        "mode": config.mode,
        "num_particles": config.num_particles,
        "num_steps": config.num_steps,
        "evidence_threshold": finite(threshold),
        # Smaller than its options where the server adapts to its load.
        "particles_mean": sums.particles_sum / rounds if rounds else config.num_particles,
        "steps_mean": sums.steps_sum / rounds if rounds else config.num_steps,
        "rounds_ct": int(rounds),
        "replayed_ct": num_replayed,
        "resample_ct": int(sums.resample_ct),
        "narrow_ct": int(sums.narrow_ct),
        # At temperature 0 any wrong draft token kills all particles, which is normal.
        "all_zero_ct": 0 if config.greedy else int(sums.all_zero_ct),
        "nan_ct": int(sums.nan_ct),
        "exact_ct": int(sums.exact_ct),
        # Before the first round the particles are equal.
        "ess_mean": sums.ess_sum / rounds if rounds else float(config.num_particles),
        "ess_min": sums.ess_min,
        "distinct_ancestors": int(sums.ancestors),
        "tilt": sums.tilt_sum / information if information else None,
        "tilt_information": information if watched else None,
        "innovation": sums.innovation_sum / watched if watched else None,
        "watched_ct": int(watched),
        # Modes that mix blocks kept by evidence with verified ones have no such estimate.
        "log_evidence": sums.log_evidence if config.weighs or config.is_exact else None,
    }
    return {META_PREFIX + name: value for name, value in fields.items()}


def correct_proposed(fields: dict[str, Any]) -> None:
    """Count as proposed, in a finished request's `meta_info`, the tokens that rounds have drafted.

    SGLang counts the server's K in each round. There is no rate where nothing was drafted.
    """
    steps = fields.get(META_PREFIX + "steps_mean")
    if steps is None or "spec_num_proposed_drafts" not in fields:
        return
    proposed = round(steps * fields[META_PREFIX + "rounds_ct"])
    fields["spec_num_proposed_drafts"] = proposed
    if proposed:
        fields["spec_accept_rate"] = fields["spec_num_correct_drafts"] / proposed
    else:
        del fields["spec_accept_rate"]


PREFIX = "sglang_spec_smc_"
"""Prefix of metric names, without SGLang's colon, which some scrapers get as an underscore.

Which of the two depends on the `Accept` header: prometheus_client 0.22 and later escapes names of
OpenMetrics' samples as if they were labels (prometheus/client_python, issue 1177).
"""


class Played(NamedTuple):
    """Results of one round for one request."""

    gained: Counters  # increments of its counters, as numbers
    weighs: bool  # whether its mode weighs particles
    num_kept: int  # columns
    is_silent: bool  # it emitted nothing
    replayed: bool  # by a captured CUDA graph
    is_greedy: bool  # temperature 0: one chain
    by_model: bool = True  # drafts are a model's, not n-gram matches
    length: int = 0  # tokens of the text, its prompt included

    @property
    def is_drafted(self) -> bool:
        """Return whether a model has drafted, from logits that were no failure."""
        return self.by_model and bool(self.gained.steps_sum) and not self.gained.nan_ct

    @property
    def is_weighed(self) -> bool:
        """Return whether the ESS is meaningful: weights of several particles, all of them finite.

        NaN logits give a NaN, which would spoil every sum.
        """
        has_rivals = self.weighs and bool(self.gained.particles_sum > 1)
        return has_rivals and math.isfinite(self.gained.ess_sum)


class Metric(NamedTuple):
    """Definition of a metric: a counter, a gauge, or with buckets a histogram."""

    name: str
    documentation: str
    # A counter's increment by a `Played`, a gauge's value by `Sums`; histograms take values.
    of: Callable[[Any], Any] = lambda value: value
    buckets: tuple[float, ...] = ()


OF_ROUNDS = (
    Metric("rounds", "Rounds, counted for each request.", lambda r: r.gained.rounds_ct),
    Metric("particles", "Particles that rounds had.", lambda r: r.gained.particles_sum),
    Metric("drafted_columns", "Tokens drafted by each particle.", lambda r: r.gained.steps_sum),
    Metric("silent_rounds", "Rounds that emitted nothing.", lambda r: r.is_silent),
    Metric("replayed_rounds", "Rounds that replayed a CUDA graph.", lambda r: r.replayed),
    Metric("resamplings", "Rounds that resampled.", lambda r: r.gained.resample_ct),
    Metric(
        "killed_particles",
        "Particles that had no descendant after a resampling.",
        lambda r: r.gained.killed_ct,
    ),
    Metric(
        "narrowed_rounds",
        "Rounds in which the lag bound drew among particles' oldest tokens.",
        lambda r: r.gained.narrow_ct,
    ),
    Metric(
        "exact_rounds",
        "Rounds in which exact verification had the last word.",
        lambda r: r.gained.exact_ct,
    ),
    Metric(
        "all_zero_rounds",
        "Rounds in which every particle died, but for those of greedy requests.",
        lambda r: 0.0 if r.is_greedy else r.gained.all_zero_ct,
    ),
    Metric(
        "nan_rounds",
        "Rounds, prefill included, that ended a request by unusable logits.",
        lambda r: r.gained.nan_ct,
    ),
)
EMITTED = (
    Metric("kept_columns", "Drafted tokens that rounds emitted."),
    Metric("emitted_tokens", "Tokens that rounds emitted."),
)
BY_LENGTH = tuple(
    Metric(f"{name}_{span}", f"{told} in texts of {begin:,} tokens and more, to the next such.")
    for span, begin in SPANS.items()
    for name, told in (
        ("drafted_rounds", "Rounds that a model drafted for"),
        ("accepted_drafts", "Draft tokens that these accepted,"),
    )
)
COUNTERS = (*OF_ROUNDS, *EMITTED, *BY_LENGTH)
"""Sums over all rounds of all requests since the server's start."""

USELESS_DRAFTS = Metric(
    "useless_drafts",
    "1 where the last rounds that drafted kept below a tenth of a token each, 0 else.",
)
GAUGES = (
    Metric(
        "tilt",
        "How far the last answers lean to the draft: 0 is the target, about 1 the draft.",
        lambda sums: sums.tilt,
    ),
    Metric("tilt_error", "Standard error of the tilt.", lambda sums: sums.tilt_error),
    Metric(
        "innovation",
        "Mean of log p + H of tokens of the last answers, nats: 0 under the target.",
        lambda sums: sums.innovation,
    ),
)

ESS_RATIO = Metric(
    "ess_ratio",
    "ESS / N of each round and request in mode smc that has N > 1 and is not greedy.",
    buckets=(0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0),
)
_GAPS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 60, 120)
CHUNK_GAP = Metric(
    "chunk_gap_seconds",
    "Seconds from one chunk of a stream with new tokens to the next.",
    buckets=_GAPS,
)
CHUNK_TOKENS = Metric(
    "chunk_tokens",  # at most the lag, 256 by default, and one round
    "New tokens of each chunk of a stream that has some.",
    buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
)
POTENTIAL_WAIT = Metric(
    "potential_wait_seconds",
    "Seconds that a round, its drafts scored, waited for one potential's answers.",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
HISTOGRAMS = (ESS_RATIO, CHUNK_GAP, CHUNK_TOKENS, POTENTIAL_WAIT)

WEIGHED: dict[str, Callable[[Counters], Any]] = {
    "weighed_rounds": lambda gains: 1,
    "ess": lambda gains: gains.ess_sum,
    "of_particles": lambda gains: gains.particles_sum,
    "of_steps": lambda gains: gains.steps_sum,
    "ess_ratio": lambda gains: gains.ess_sum / gains.particles_sum,
    "free_share": lambda gains: (gains.ess_sum - 1) / (gains.particles_sum - 1),
}
"""Sums over the rounds in which the ESS is meaningful, for the log and its warning."""


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
        self._alarm = UselessDrafts(now)
        self._sums: defaultdict[str, float] = defaultdict(float)
        # At the last log line; at the last test of the ESS.
        self._logged = self._sums.copy()
        self._tested = self._sums.copy()
        self._num_batches = 0
        self._warned = -math.inf
        self._round: list[Played] = []
        self._correct_drafts = 0  # emitted since a round's result has taken them
        self._prometheus = Prometheus()
        self._is_silent = False

    def report_as(self, reporter: SchedulerMetricsReporter) -> None:
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

    def count_emitted(self, num_drafts: int, num_tokens: int) -> None:
        """Count tokens that a round has put out, up to the end of its answer.

        Args:
            num_drafts: of these and earlier tokens, in rounds that have put out all of theirs.
        """
        self._correct_drafts += num_drafts
        self._add({"kept_columns": num_drafts, "emitted_tokens": num_tokens})

    def take_correct_drafts(self) -> int:
        """Return the draft tokens that were counted as emitted since the last call."""
        taken = self._correct_drafts
        self._correct_drafts = 0
        return taken

    def _add(self, sums: Mapping[str, Any]) -> None:
        for name, value in sums.items():
            self._sums[name] += value
            self._prometheus.count(name, value)

    def end_round(self) -> None:
        """Add the round's results to totals, metrics and log."""
        weighed = [played.gained for played in self._round if played.is_weighed]
        self._add({metric.name: sum(map(metric.of, self._round)) for metric in OF_ROUNDS})
        for name, of in WEIGHED.items():
            self._sums[name] += sum(map(of, weighed))
        self._add(self._by_length())
        self._round = []
        for gains in weighed:
            self._prometheus.observe(ESS_RATIO, gains.ess_sum / gains.particles_sum)
        self._num_batches += 1
        warning = self._alarm.check()
        self._prometheus.set(USELESS_DRAFTS, self._alarm.is_on)
        if self._is_silent:
            return
        if warning is not None:
            logger.warning("%s", warning)
        if self._num_batches % self._interval == 0:
            self._write_log()
        self._warn_of_low_ess()

    def _by_length(self) -> dict[str, int]:
        """Return the increments of `BY_LENGTH` in the round, of which the alarm hears, too."""
        sums: defaultdict[str, int] = defaultdict(int)
        for played in self._round:
            if played.is_drafted:
                span = span_of(played.length)
                self._alarm.add(played.num_kept, span)
                sums[f"drafted_rounds_{span}"] += 1
                sums[f"accepted_drafts_{span}"] += played.num_kept
        return sums

    def _write_log(self) -> None:
        new = _since(self._logged, self._sums)
        self._logged = self._sums.copy()
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
        new = _since(self._tested, self._sums)
        count = new["weighed_rounds"]
        if count < LOW_ESS_ROUNDS:
            return
        self._tested = self._sums.copy()
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
        if answer.mode == "auto":  # whose tilt follows the dial's formula, at any c
            self.dial.learn(answer.evidence_threshold, answer.tilt_sum, answer.tilt_information)
        self._prometheus.show(self._watched.all)
        if warning is not None and not self._is_silent:
            logger.warning("%s", warning)

    def fidelity(self) -> dict[str, dict[str, Any]]:
        """Return the fidelity fields of the newest answers, by mode and over all."""
        return self._watched.as_dict()

    def time_chunk(self, last: float | None, num_tokens: int) -> float:
        """Observe a chunk that a stream sends, and return its time.

        ``last`` is the time of the chunk before; None for the first, whose time is the TTFT.
        """
        now = self._now()
        self._prometheus.observe(CHUNK_TOKENS, num_tokens)
        if last is not None:
            self._prometheus.observe(CHUNK_GAP, now - last)
        return now

    def time_potential(self, seconds: float) -> None:
        self._prometheus.observe(POTENTIAL_WAIT, seconds)

    def totals(self) -> dict[str, Any]:
        """Return sums since the start, and means over them; a mean over nothing is None."""
        sums = {metric.name: int(self._sums[metric.name]) for metric in COUNTERS}
        weighed = int(self._sums["weighed_rounds"])
        return {
            **sums,
            "mean_particles": _mean(sums["particles"], sums["rounds"]),
            "mean_steps": _mean(sums["drafted_columns"], sums["rounds"]),
            "mean_kept_columns": _mean(sums["kept_columns"], sums["rounds"]),
            "mean_emitted_tokens": _mean(sums["emitted_tokens"], sums["rounds"]),
            "weighed_rounds": weighed,
            "mean_ess_ratio": _mean(self._sums["ess_ratio"], weighed),
            USELESS_DRAFTS.name: self._alarm.is_on,
            "useless_drafts_from": self._alarm.begins_at,
        }


class Prometheus:
    """SMC's metrics, with the labels of the scheduler's own metrics.

    Args:
        collector: SGLang's, which gives the metric classes and labels; None: nothing is exported.
    """

    def __init__(self, collector: SchedulerMetricsCollector | None = None) -> None:
        self._collector = collector
        self._made: dict[str, Any] = {}
        if collector is None:
            return
        # Imported late: the client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
        import prometheus_client as client

        counter = collector._counter_cls or client.Counter
        histogram = collector._histogram_cls or client.Histogram
        self._gauge = collector._gauge_cls or client.Gauge
        for metric in COUNTERS:
            self._make(counter, metric, suffix="_total")
        for metric in HISTOGRAMS:
            self._make(histogram, metric, buckets=metric.buckets)

    def _make(self, kind: Any, metric: Metric, suffix: str = "", **more: Any) -> None:
        """Create a metric; it is exported from then on, a counter as 0, since it has its labels."""
        assert self._collector is not None
        labels = self._collector.labels
        self._made[metric.name] = kind(
            name=f"{PREFIX}{metric.name}{suffix}",
            documentation=metric.documentation,
            labelnames=labels.keys(),
            **more,
        ).labels(**labels)

    def count(self, name: str, value: Any) -> None:
        if self._made and value:
            self._made[name].inc(value)

    def show(self, sums: Sums) -> None:
        """Set the gauges to the answers' values; a gauge is created with its first value."""
        for gauge in GAUGES:
            self.set(gauge, gauge.of(sums))

    def set(self, gauge: Metric, value: float | None) -> None:
        """Set a gauge to its value, if it has one."""
        if self._collector is None or value is None:
            return
        if gauge.name not in self._made:
            self._make(self._gauge, gauge, multiprocess_mode="mostrecent")
        self._made[gauge.name].set(value)

    def observe(self, histogram: Metric, value: Any) -> None:
        if self._made:
            self._made[histogram.name].observe(value)


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return defaultdict(float, {name: value - before[name] for name, value in now.items()})


def _mean(total: Any, count: int) -> float | None:
    return total / count if count else None
