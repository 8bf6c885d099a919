"""What a server counts of its rounds, and shows on /metrics and in /server_info."""

import logging
import math
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client
import pytest
import torch
from edit_cases import NEUTRAL
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from toy_laws import EOS, languages
from toy_worker import ToyWorker

from sglang_smc import process
from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches.request_state import update_finish_state
from sglang_smc.requests.state import RequestState
from sglang_smc.round.result import SMCBatchResult
from sglang_smc.state import counters
from sglang_smc.state.counters import Counters
from sglang_smc.state.monitor import GAUGES, MEASURES, PREFIX, TOTALS, Monitor, Played
from sglang_smc.state.watched import Answer

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Where metrics of the test go, in place of the process's one registry."""
    fresh = CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(
            prometheus_client, name, lambda kind=kind, **given: kind(registry=fresh, **given)
        )
    return fresh


def reporter(*, exports: bool = True, logs: bool = True) -> Any:
    collector = SimpleNamespace(
        labels=LABELS, _counter_cls=None, _gauge_cls=None, _histogram_cls=None
    )
    return SimpleNamespace(
        metrics_collector=collector,
        current_scheduler_metrics_enabled=exports,
        is_stats_logging_rank=logs,
    )


def played(
    *,
    weighs: bool = True,
    kept: int = 0,
    emitted: int = 0,
    replayed: bool = False,
    greedy: bool = False,
    **gains: float,
) -> Played:
    given = {"rounds_ct": 1, "particles_sum": 1 if greedy else 4, "ess_sum": 2.0, **gains}
    zeros = dict.fromkeys(Counters._fields, 0.0)
    return Played(Counters(**{**zeros, **given}), weighs, kept, emitted, replayed, greedy)


def monitor(*rounds: list[Played], interval: int = 1000, **reporting: bool) -> Monitor:
    found = Monitor(interval)
    found.report_as(reporter(**reporting))
    for batch in rounds:
        for one in batch:
            found.add(one)
        found.end_round()
    return found


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Values by name, of a histogram by name and bound."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        bound = sample.labels.pop("le", "")
        assert sample.labels == LABELS
        found[sample.name.removeprefix(PREFIX) + (f" {bound}" if bound else "")] = sample.value
    return found


EVERYTHING = (
    [
        played(kept=3, emitted=0, resample_ct=1, killed_ct=2, steps_sum=3, ess_sum=1.0),
        played(
            weighs=False, kept=1, emitted=2, replayed=True, exact_ct=1, steps_sum=5, ess_sum=4.0
        ),
    ],
    [played(kept=2, emitted=9, narrow_ct=1, all_zero_ct=1, nan_ct=1, particles_sum=8, ess_sum=8.0)],
)
EXPECTED = {
    "rounds": 3,
    "particles": 16,
    "drafted_columns": 8,
    "kept_columns": 6,
    "emitted_tokens": 11,
    "silent_rounds": 1,
    "replayed_rounds": 1,
    "resamplings": 1,
    "killed_particles": 2,
    "narrowed_rounds": 1,
    "exact_rounds": 1,
    "all_zero_rounds": 1,
    "nan_rounds": 1,
}


def test_each_event_has_a_counter_of_its_own(registry: CollectorRegistry) -> None:
    monitor(*EVERYTHING)
    found = samples(registry)
    counted = {name: found[f"{name}_total"] for name in EXPECTED}
    assert counted == EXPECTED
    assert {total.name for total in TOTALS} == set(EXPECTED)


def test_the_ess_is_observed_where_weights_can_be_uneven(registry: CollectorRegistry) -> None:
    """Not where a request is verified or greedy, one particle has no rival, or logits are NaN."""
    lone, lost = played(particles_sum=1, ess_sum=1.0), played(ess_sum=math.nan)
    monitor(*EVERYTHING, [lone, lost, played(weighs=False), played(greedy=True, ess_sum=4.0)])
    found = samples(registry)
    assert (found["ess_ratio_count"], found["ess_ratio_sum"]) == (2, 1.25)
    assert (found["ess_ratio_bucket 0.2"], found["ess_ratio_bucket 0.3"]) == (0, 1)
    assert (found["ess_ratio_bucket 0.95"], found["ess_ratio_bucket 1.0"]) == (1, 2)


def test_all_metrics_are_there_before_the_first_round(registry: CollectorRegistry) -> None:
    """Else the first events are lost to `rate`, which sees no increase from nothing."""
    monitor()
    found = samples(registry)
    assert {f"{total.name}_total" for total in TOTALS} <= set(found)
    assert {f"{measure.name}_bucket +Inf" for measure in MEASURES} <= set(found)
    assert not any(value for name, value in found.items() if not name.endswith("_created"))


def test_no_name_has_the_colon_that_scrapers_read_in_two_ways(registry: CollectorRegistry) -> None:
    """Prometheus 2 and 3, and what asks for plain text, get the same names."""
    monitor()
    escaped = openmetrics.generate_latest(registry, escaping=openmetrics.UNDERSCORES).decode()
    plain = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8).decode()
    assert escaped == plain and PREFIX in plain


WRONG_GUESS = {"all_zero_ct": 1, "ess_sum": 4.0, "kept": 0}


def test_wrong_guesses_at_a_greedy_law_are_no_alarm(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """On /metrics, in /server_info and in the log: they say nothing of what filters forbid."""
    caplog.set_level(logging.INFO)
    rounds = [played(**WRONG_GUESS, greedy=True), played(**WRONG_GUESS)]
    totals = monitor(rounds, interval=1).totals()
    assert totals["all_zero_rounds"] == samples(registry)["all_zero_rounds_total"] == 1
    assert "#round: 2" in caplog.text and "#all-zero: 1" in caplog.text


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_round_is_booked_as_that_of_a_greedy_request(is_greedy: bool) -> None:
    seen: list[Played] = []
    state = RequestState.of(0, RequestConfig(num_particles=4, greedy=is_greedy))
    req: Any = SimpleNamespace(
        smc_state=state,
        spec_num_correct_drafts=0,
        update_spec_correct_drafts_histogram=lambda _: None,
    )
    result = SMCBatchResult(
        monitor=cast(Monitor, SimpleNamespace(add=seen.append)),
        failure=torch.zeros(1, dtype=torch.int64),
    )
    result._take(0, req, 0, [], state.counters)
    assert [one.is_greedy for one in seen] == [is_greedy]


@pytest.mark.parametrize(
    ("one", "shown"), [({}, "0.50"), ({"weighs": False}, "-"), ({"greedy": True}, "-")]
)
def test_the_log_shows_an_ess_where_rounds_have_one(
    caplog: pytest.LogCaptureFixture, one: dict[str, bool], shown: str
) -> None:
    caplog.set_level(logging.INFO)
    others = [played(weighs=False, ess_sum=4.0), played(greedy=True, ess_sum=4.0)]
    monitor([played(**one), *others], interval=1, exports=False)
    assert f"#round: 3, ess / particles: {shown}, " in caplog.text


def ended(mode: str = "smc", tilt: float = 0.5, information: float = 4.0) -> Answer:
    return Answer(mode, 0.5, tilt * information, information, 0.75, 3.0)


def test_gauges_tell_the_tilt_once_there_is_one(registry: CollectorRegistry) -> None:
    """A gauge that shows 0 before would say that answers are the target's own."""
    found = monitor()
    found.end_answer(ended(information=0.0)._replace(watched_ct=0.0))
    assert not set(GAUGES) & set(samples(registry))
    found.end_answer(ended())
    shown = samples(registry)
    assert {name: shown[name] for name in GAUGES} == {
        "tilt": 0.5,
        "tilt_error": 0.5,
        "innovation": 0.25,
    }
    found.end_answer(ended("mixed", -0.5))
    assert samples(registry)["tilt"] == 0.0
    assert {name: of["tilt"] for name, of in found.fidelity().items()} == {
        "all": 0.0,
        "smc": 0.5,
        "mixed": -0.5,
    }


def test_a_prefill_that_fails_shows_in_the_next_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = monitor(interval=1, exports=False)
    found.count_failed_prefill()
    for _ in range(2):
        found.add(played(nan_ct=1))
        found.end_round()
    assert ["#nan: 2" in caplog.messages[0], "#nan: 1" in caplog.messages[1]] == [True, True]


class Streamed:
    """A stream as the scheduler sees it, whose times a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stream: bool = True) -> None:
        self.seconds = 100.0
        monitor = Monitor(interval=1000, now=lambda: self.seconds)
        monitor.report_as(reporter())
        monkeypatch.setattr(process, "_monitor", monitor)
        state = RequestState.of(0, RequestConfig(num_particles=4))
        self.req: Any = SimpleNamespace(smc_state=state, output_ids=[], to_finish=None, rid="r")
        self.req.finished, self.req.return_logprob = lambda: False, False
        self.req.grammar, self.req.custom_logit_processor, self.req.stream = None, None, stream
        self.req.sampling_params = SimpleNamespace(**NEUTRAL)
        self.req.output_ids_through_stop = self.req.output_ids

    def emit(self, num_tokens: int, after: float, num_kept: int | None = None) -> None:
        """Take what a prefill or round emits, of which an end may keep less."""
        self.seconds += after
        ids, kept = self.req.output_ids, num_tokens if num_kept is None else num_kept
        ids.extend([5] * num_tokens)
        self.req.output_ids_through_stop = ids[: len(ids) - num_tokens + kept]
        update_finish_state(lambda *_: None, self.req, num_tokens)


def chunks(registry: CollectorRegistry) -> tuple[float, float, float, float]:
    """Gaps: number and seconds; chunks: number and tokens."""
    found = samples(registry)
    names = ("chunk_gap_seconds", "chunk_tokens")
    count, total, *others = (found[f"{n}_{part}"] for n in names for part in ("count", "sum"))
    return count, total, others[0], others[1]


def test_the_gaps_of_a_stream_are_those_between_new_tokens(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From prefill's token on; rounds that emit nothing make the silence longer, not shorter."""
    stream = Streamed(monkeypatch)
    for num_tokens, after in [(1, 3.0), (0, 0.5), (0, 1.0), (9, 2.5), (2, 0.25)]:
        stream.emit(num_tokens, after)
    assert chunks(registry) == (2, 4.25, 3, 12)
    found = samples(registry)
    assert (found["chunk_gap_seconds_bucket 3.0"], found["chunk_gap_seconds_bucket 5.0"]) == (1, 2)
    assert (found["chunk_tokens_bucket 8.0"], found["chunk_tokens_bucket 12.0"]) == (2, 3)


def test_tokens_behind_an_end_are_in_no_chunk(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Streamed(monkeypatch)
    stream.emit(1, 0.0)
    stream.emit(9, 1.0, num_kept=4)
    assert chunks(registry) == (1, 1.0, 2, 5)


def test_an_answer_that_comes_as_one_has_no_chunks(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Streamed(monkeypatch, stream=False)
    stream.emit(1, 0.0)
    stream.emit(9, 1.0)
    assert chunks(registry) == (0, 0, 0, 0)


def test_waits_for_potentials_are_measured(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those who ask on a server, of which `Call.answers` is the only way to wait."""
    monkeypatch.setattr(process, "potentials_of", lambda _: ("slow=steered:Slow",))
    monkeypatch.setattr(process, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    process.callers_of(cast(Any, None), SMCConfig(), monitor())["slow"].waited(0.25)
    parts, found = ("sum", "bucket 0.2", "bucket 0.5"), samples(registry)
    assert [found[f"potential_wait_seconds_{part}"] for part in parts] == [0.25, 0, 1]


def test_a_prefill_that_fails_is_counted_though_it_is_no_round(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the hook that ends such a request: a broken model shows in its prefill first."""
    counting = monitor()
    monkeypatch.setattr(process, "_monitor", counting)
    output_ids = [-1]  # a code of `Failure` in place of the first token
    run = RequestState.of(0, RequestConfig(num_particles=4))
    req: Any = SimpleNamespace(
        smc_state=run, output_ids=output_ids, to_finish=None, rid="r", finished=lambda: False
    )
    req.grammar, req.custom_logit_processor, req.stream = None, None, False
    req.sampling_params = SimpleNamespace(**NEUTRAL, min_new_tokens=0)
    update_finish_state(lambda *_: None, req)
    totals = counting.totals()
    assert (totals["nan_rounds"], totals["rounds"]) == (1, 0)
    assert samples(registry)["nan_rounds_total"] == 1


def test_only_where_sglang_exports_do_we(registry: CollectorRegistry) -> None:
    monitor(*EVERYTHING, exports=False)
    assert not samples(registry)


def test_totals_are_kept_without_prometheus_and_have_means() -> None:
    found = monitor(*EVERYTHING, exports=False).totals()
    means = {
        "mean_particles": 16 / 3,
        "mean_steps": 8 / 3,
        "mean_kept_columns": 2.0,
        "mean_emitted_tokens": 11 / 3,
        "mean_ess_ratio": 0.625,
    }
    assert found == {**EXPECTED, **means, "weighed_rounds": 2}
    assert all(type(found[name]) is int for name in EXPECTED)


def test_means_over_nothing_are_none() -> None:
    found = Monitor(interval=1).totals()
    assert {found[name] for name in found if name.startswith("mean_")} == {None}


def test_other_metric_classes_are_taken_where_the_collector_has_them() -> None:
    """As for a server whose stat_loggers report elsewhere."""
    given = reporter()
    made: list[str] = []

    class Recorder:
        def __init__(self, name: str, **_: Any) -> None:
            made.append(name)

        def labels(self, **_: Any) -> "Recorder":
            return self

    given.metrics_collector._counter_cls = given.metrics_collector._histogram_cls = Recorder
    Monitor(interval=1).report_as(given)
    assert len(made) == len(TOTALS) + len(MEASURES)


@pytest.mark.parametrize(
    ("logs", "given", "num_lines"),
    [
        (True, {}, 2),
        (True, {"weighs": False}, 1),
        (True, {"greedy": True}, 1),
        (False, {}, 0),
    ],
)
def test_log_and_warning_come_from_one_rank_and_of_weighed_rounds(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    logs: bool,
    given: dict[str, bool],
    num_lines: int,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(counters, "LOW_ESS_ROUNDS", 2)
    low = [played(**given, ess_sum=1.0)]
    found = Monitor(interval=2)
    found.report_as(reporter(exports=False, logs=logs))
    for one in low * 2:
        found.add(one)
        found.end_round()
    assert len(caplog.messages) == num_lines


@pytest.mark.parametrize(("mode", "kills"), [("smc", True), ("exact", False)])
def test_only_resamplings_kill(mode: str, kills: bool) -> None:
    """A verification's winner is handed to all as well, but the others were its rivals."""
    config = SMCConfig(num_particles=4, num_steps=2, mode=mode, ess_threshold=1.0)
    toy = ToyWorker(config, *languages(), num_requests=8, max_new_tokens=12, eos=EOS)
    reqs = toy.begin(list(range(1, 9)), torch.full((8,), 0.3, dtype=torch.float64))
    totals = toy.play_round(reqs).counters.tolist()
    assert any(Counters(*row).killed_ct for row in totals) == kills
