"""What a server counts of its rounds and says of them: meta_info, /metrics, /server_info, logs."""

import functools
import logging
import math
import random
import re
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import prometheus_client
import pytest
from populations import outcome_of
from prometheus_client import CollectorRegistry
from toy_request import begun

from sglang_smc import process
from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches.ingress import add_meta_info, count_proposed, update_meta_info
from sglang_smc.patches.request_state import update_finish_state
from sglang_smc.round.result import SMCBatchResult
from sglang_smc.server import texts
from sglang_smc.state import fidelity, metrics
from sglang_smc.state.alarm import ROUNDS
from sglang_smc.state.fidelity import ALL, AnswerFidelity, FidelityWindows, Sums, Window
from sglang_smc.state.metrics import LOW_ESS_ROUNDS, LOW_ESS_SECONDS, Counters, Monitor, Played
from sglang_smc.state.request import RequestState

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0"}


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that ran before in this process may have left the root logger at errors alone."""
    caplog.set_level(logging.INFO)


def gains(**values: Any) -> Counters:
    return Counters(**{**dict.fromkeys(Counters._fields, 0.0), **values})


# --- Counters of a request

OF_REQUEST = Counters(4, 2, 1, 3, 7, 5, 9, 10.0, 22, 11, 1.5, 2.0, 0.5, 2.0, -0.75, 3, -0.75)


@pytest.mark.parametrize(
    ("config", "log_evidence", "threshold", "all_zero_ct"),
    [
        (RequestConfig(), -0.75, 0.5, 3),
        (RequestConfig(greedy=True, num_particles=1), -0.75, 0.5, 0),
        (RequestConfig(greedy=True), -0.75, None, 0),
        (RequestConfig(mode="exact"), -0.75, None, 3),
        (RequestConfig(mode="auto", evidence_threshold=0.5), None, 0.5, 3),
        (RequestConfig(mode="auto"), None, 2.0, 3),
    ],
)
def test_what_a_mode_leaves_out(
    config: RequestConfig, log_evidence: float | None, threshold: float | None, all_zero_ct: int
) -> None:
    """Where blocks are kept by evidence a text has none; all of greedy drafts die at one error."""
    found = metrics.meta_info(list(OF_REQUEST), config, 0)
    assert found["spec_smc_mode"] == config.mode
    assert found["spec_smc_log_evidence"] == log_evidence
    assert found["spec_smc_evidence_threshold"] == threshold
    assert found["spec_smc_all_zero_ct"] == all_zero_ct
    assert all(type(value) is int for name, value in found.items() if name.endswith("_ct"))


def test_before_the_first_round_all_particles_count() -> None:
    """A text of one token ends in prefill: no round, no division by zero."""
    found = metrics.meta_info(metrics.zero_counters(5), RequestConfig(num_particles=5), 0)
    assert found["spec_smc_ess_mean"] == found["spec_smc_ess_min"] == 5.0
    assert found["spec_smc_distinct_ancestors"] == found["spec_smc_particles_mean"] == 5
    assert found["spec_smc_steps_mean"] == 8
    assert found["spec_smc_rounds_ct"] == 0
    unknown = "tilt", "tilt_information", "innovation"
    assert [found[f"spec_smc_{name}"] for name in unknown] == [None] * 3, "0 would be the target's"
    assert found["spec_smc_watched_ct"] == 0


# --- What of them reaches the client


class Letters:
    """A tokenizer: 1 reads a, 2 reads b, and so on; 0 is special."""

    is_fast = True

    def __len__(self) -> int:
        return 27

    def batch_decode(
        self, ids: list[list[int]], skip_special_tokens: bool, **spaces: bool
    ) -> list[str]:
        return [self.decode(one, skip_special_tokens) for one in ids]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        letters = "" if skip_special_tokens else "."
        return "".join(chr(96 + one) if one else letters for one in ids)


ARGUMENTS = SimpleNamespace(disable_tokenizer_batch_decode=False, tool_call_parser=None)
DETOKENIZED = {
    "before": [5],
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


@pytest.fixture
def _read_as_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "resolved", lambda server_args: server_args)


def shown(tokenizer: Any = None, times: int = 1, **accumulated: list[Any]) -> dict[str, Any]:
    state = SimpleNamespace(customized_info_accumulated=accumulated)
    manager: Any = SimpleNamespace(
        rid_to_state={"a": state}, tokenizer=tokenizer, server_args=ARGUMENTS
    )
    meta_info: dict[str, Any] = dict(accumulated)
    for _ in range(times):
        add_meta_info(lambda *_: None, manager, meta_info, SimpleNamespace(rids=["a"]), 0)
    return meta_info


def given(finish: dict | None, tokenizer: Any = None, **info: list[list[Any]]) -> dict[str, Any]:
    """What meta_info has of the second request of an output batch."""
    found: dict[str, Any] = {}

    def accumulate(_: Any, meta_info: dict, state: Any, own: dict, index: int, *__: Any) -> None:
        meta_info.update({name: values[index] for name, values in own.items()})

    manager: Any = SimpleNamespace(tokenizer=tokenizer, server_args=ARGUMENTS)
    update_meta_info(accumulate, manager, found, None, info, 1, finish)
    return found


@pytest.mark.usefixtures("_read_as_resolved")
def test_a_chunk_of_a_request_that_goes_on_has_no_totals() -> None:
    """Red if it has fields of a neighbour that ends in the same output batch, as [] or null."""
    batch: dict[str, Any] = {"spec_smc_rounds_ct": [[7], []], "theirs": [[1], [2]]}
    assert given(None, **batch) == {"theirs": [2]}
    assert given({"type": "stop"}, **batch) == {"theirs": [2]}
    batch["spec_smc_rounds_ct"][1] = [None, 3]
    batch |= {"spec_smc_particles": [[[]], [None]], "spec_smc_log_evidence": [[0.5], [None]]}
    own = {"spec_smc_rounds_ct": 3, "spec_smc_log_evidence": None, "theirs": [2]}
    assert given({"type": "stop"}, **batch) == own
    particle = {"output_ids": [1, 0, 2], "finish_reason": None}
    asked = {"spec_smc_particles": [[], [[particle]]]}
    found = given({}, Letters(), **asked, spec_smc_detokenization=[[], [DETOKENIZED]])
    assert found == {"spec_smc_particles": [{**particle, "text": "ab"}]}


def test_totals_are_numbers_on_the_oldest_release_too() -> None:
    """With no text at all, as after an abort in the queue, SGLang fills in an empty list."""
    found = shown(spec_smc_rounds_ct=[None, 3], theirs=[1, 2], spec_smc_log_evidence=[None])
    own = {"spec_smc_rounds_ct": 3, "spec_smc_log_evidence": None}
    assert found == {**own, "theirs": [1, 2]}
    for of_neighbours in ([], [None], [None, None]):
        assert shown(spec_smc_particles=of_neighbours) == {}


ROUND = {"begins": [1], "drafted": [[2, 3], []], "bonus": [0, None], "emitted": [4]}


@pytest.mark.usefixtures("_read_as_resolved")
@pytest.mark.parametrize("times", [1, 2])
def test_tokens_are_readable_where_there_is_a_tokenizer(times: int) -> None:
    """Red if a token of some field is left out, or if what ends a stream is read twice over."""
    particle = {"output_ids": [1, 0, 2], "finish_reason": None}
    trace = {"rounds": [ROUND]}
    own = {"spec_smc_particles": [[dict(particle)]], "spec_smc_trace": [dict(trace)]}
    own |= {"spec_smc_detokenization": [DETOKENIZED]}
    assert shown(**own) == {"spec_smc_particles": [particle], "spec_smc_trace": trace}
    found = shown(Letters(), times, **own)
    assert found["spec_smc_particles"] == [{**particle, "text": "ab"}]
    assert found["spec_smc_trace"]["pieces"] == {"0": ".", "1": "a", "2": "b", "3": "c", "4": "d"}


@pytest.mark.parametrize("hook", [count_proposed, add_meta_info])
@pytest.mark.parametrize(
    ("steps", "rounds", "proposed", "rate"), [(0, 3, 0, None), (2, 4, 8, 0.5), (1.5, 4, 6, 4 / 6)]
)
def test_drafts_are_proposed_where_a_round_drafts(
    hook: Any, steps: float, rounds: int, proposed: int, rate: float | None
) -> None:
    """Red where the server's K counts in rounds that draft less, or there is a rate of nothing."""
    own: dict[str, Any] = {"spec_smc_steps_mean": steps, "spec_smc_rounds_ct": rounds}
    sglang_s = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 40}
    found: dict[str, Any] = {**own, **sglang_s, "spec_num_correct_drafts": 4}
    state = SimpleNamespace(customized_info_accumulated={})
    manager: Any = SimpleNamespace(rid_to_state={"a": state}, tokenizer=None)
    hook(lambda *_: None, manager, found, SimpleNamespace(rids=["a"]), 0)
    assert found["spec_num_proposed_drafts"] == proposed
    assert found.get("spec_accept_rate") == rate
    for without in ({}, own):
        kept = dict(without)
        hook(lambda *_: None, manager, kept, SimpleNamespace(rids=["a"]), 0)
        assert kept == without, "stock fields are absent where the server's K is 0"


# --- Sums of a server


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Where metrics of the test go, in place of the process's one registry."""
    fresh = CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        kind = functools.partial(getattr(prometheus_client, name), registry=fresh)
        monkeypatch.setattr(prometheus_client, name, kind)
    return fresh


def reporter(*, exports: bool = True, logs: bool = True) -> Any:
    kinds = dict.fromkeys(("_counter_cls", "_gauge_cls", "_histogram_cls"))
    return SimpleNamespace(
        metrics_collector=SimpleNamespace(labels=LABELS, **kinds),
        current_scheduler_metrics_enabled=exports,
        is_stats_logging_rank=logs,
    )


def played(*, weighs: bool = True, greedy: bool = False, **others: float) -> Played:
    """One request's part of a round; ``others`` are of it and of its counters."""
    names = ("num_kept", "is_silent", "replayed", "length")
    own = {name: others.pop(name, 0) for name in names}
    own["by_model"] = others.pop("by_model", 1)
    given = {"rounds_ct": 1, "particles_sum": 1 if greedy else 4, "ess_sum": 2.0, **others}
    return Played(gains(**given), weighs=weighs, is_greedy=greedy, **own)  # type: ignore[arg-type]


def monitor(*rounds: list[Played], interval: int = 1000, **reporting: bool) -> Monitor:
    found = Monitor(interval)
    found.report_as(reporter(**reporting))
    for batch in rounds:
        for one in batch:
            found.add(one)
            found.count_emitted(2, 3)
        found.end_round()
    return found


def play(found: Monitor, share: float, num_rounds: int, num_particles: int = 8) -> None:
    ess = 1 + share * (num_particles - 1)
    for _ in range(num_rounds):
        found.add(played(ess_sum=ess, particles_sum=num_particles, steps_sum=6, num_kept=1))
        found.end_round()


@pytest.mark.parametrize(("num_particles", "ess"), [(2, 1.1), (64, 9.5)])
def test_one_rank_warns_of_a_low_ess(
    caplog: pytest.LogCaptureFixture, num_particles: int, ess: float
) -> None:
    """For two particles, too, whose ESS / N is never below a half."""
    interval = 2 * LOW_ESS_ROUNDS
    play(Monitor(interval), metrics.LOW_ESS * 1.1, LOW_ESS_ROUNDS, num_particles)
    quiet: dict[str, Any] = {"interval": interval, "exports": False}
    for kind in ({"weighs": False}, {"greedy": True}):
        monitor(*[[played(**kind, ess_sum=1.0)]] * LOW_ESS_ROUNDS, **quiet)
    play(monitor(**quiet, logs=False), 0.0, LOW_ESS_ROUNDS, num_particles)
    assert not caplog.records
    play(Monitor(interval), metrics.LOW_ESS * 0.9, LOW_ESS_ROUNDS, num_particles)
    told = rf"{ess} of {num_particles}\.0 particles, with 6\.0 tokens.*--speculative-smc-mode"
    assert re.search(told, caplog.text)


def test_a_warning_waits_for_its_rounds_and_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    seconds = [0.0]
    found = Monitor(100 * LOW_ESS_ROUNDS, lambda: seconds[0])
    for share, num_rounds, seconds[0], num_warnings in (
        (0.0, LOW_ESS_ROUNDS - 1, 0.0, 0),
        (1.0, 1, 0.0, 1),  # the mean, not the last round
        (0.0, 3 * LOW_ESS_ROUNDS, LOW_ESS_SECONDS - 1, 1),
        (0.0, LOW_ESS_ROUNDS, LOW_ESS_SECONDS, 2),
        (metrics.LOW_ESS * 1.1, LOW_ESS_ROUNDS, 9 * LOW_ESS_SECONDS, 2),
        (0.0, LOW_ESS_ROUNDS - 1, 9 * LOW_ESS_SECONDS, 2),
    ):
        play(found, share, num_rounds)
        assert len(caplog.messages) == num_warnings


def test_drafts_of_no_use_raise_one_alarm(
    caplog: pytest.LogCaptureFixture, registry: CollectorRegistry
) -> None:
    """By rounds for which a model has drafted, and not by a few of them."""
    others = [
        {"steps_sum": 0},  # plain rounds
        {"steps_sum": 4, "by_model": 0},  # n-grams, with matches or without
        {"steps_sum": 4, "nan_ct": 1},  # logits that are broken
    ]
    found = monitor(*[[played(**other)] for other in others] * ROUNDS, interval=10**6)
    assert found.totals()["useless_drafts"] is None and not caplog.records
    assert "useless_drafts" not in samples(registry)
    for kept, num_rounds, is_on, num_warnings in (
        (0, ROUNDS - 1, None, 0),
        (ROUNDS // 5, 1, False, 0),  # the mean, not the last round
        (0, ROUNDS, True, 1),
        (0, 3 * ROUNDS, True, 1),
        (1, ROUNDS, False, 1),
        (0, ROUNDS, True, 1),  # within ten minutes
    ):
        for _ in range(num_rounds):
            found.add(played(num_kept=kept, steps_sum=4))
            found.end_round()
        assert len(caplog.messages) == num_warnings
        assert found.totals()["useless_drafts"] is is_on
    assert samples(registry)["useless_drafts"] == 1
    assert "accepted 0.000 draft tokens a round" in caplog.text
    quiet = monitor(*[[played(steps_sum=4)]] * ROUNDS, interval=10**6, exports=False, logs=False)
    assert quiet.totals()["useless_drafts"] and len(caplog.messages) == 1


def test_drafts_of_no_use_in_long_texts_alone_are_told_with_the_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red where short texts hide it, where the length is another, or where it is told twice."""
    found = Monitor(10**6)
    for length, kept, begin, num_warnings in (
        (100, 4, None, 0),
        (2047, 4, None, 0),
        (9000, 0, 8192, 1),
        (40_000, 0, 8192, 1),
        (9000, 2, 32_768, 1),
        (40_000, 1, None, 1),
    ):
        for _ in range(ROUNDS):
            found.add(played(num_kept=kept, steps_sum=4, length=length))
            found.end_round()
        assert found.totals()["useless_drafts_from"] == begin
        assert len(caplog.messages) == num_warnings
    assert "in texts of 8,192 tokens and more" in caplog.text
    assert "--speculative-draft-window-size" in caplog.text
    assert found.totals()["useless_drafts"] is False
    counted = {name: found.totals()[name] / ROUNDS for name in BY_LENGTH}
    rounds = {"0_2k": 2, "2k_8k": 0, "8k_32k": 2, "32k": 2}
    accepted = {"0_2k": 8, "2k_8k": 0, "8k_32k": 2, "32k": 1}
    assert counted == {
        **{f"drafted_rounds_{span}": count for span, count in rounds.items()},
        **{f"accepted_drafts_{span}": count for span, count in accepted.items()},
    }


def samples(registry: CollectorRegistry) -> dict[str, float]:
    found = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        bound = sample.labels.pop("le", "")
        assert sample.labels == LABELS
        name = sample.name.removeprefix(metrics.PREFIX)
        found[f"{name} {bound}".strip()] = sample.value
    return found


BY_LENGTH = [metric.name for metric in metrics.BY_LENGTH]
EIGHT = {"particles_sum": 8, "ess_sum": 8.0}
EVERYTHING = (
    [
        played(is_silent=1, resample_ct=1, killed_ct=2, steps_sum=3, ess_sum=1.0),
        played(weighs=False, replayed=1, exact_ct=1, steps_sum=5),
    ],
    [played(narrow_ct=1, all_zero_ct=1, nan_ct=1, **EIGHT)],
)
EXPECTED = {
    "rounds": 3,
    "particles": 16,
    "drafted_columns": 8,
    "kept_columns": 6,
    "emitted_tokens": 9,
    "silent_rounds": 1,
    "replayed_rounds": 1,
    "resamplings": 1,
    "killed_particles": 2,
    "narrowed_rounds": 1,
    "exact_rounds": 1,
    "all_zero_rounds": 1,
    "nan_rounds": 1,
    **dict.fromkeys(BY_LENGTH, 0),
    "drafted_rounds_0_2k": 2,
    "accepted_drafts_0_2k": 0,
}


def test_each_event_is_counted_in_metrics_and_in_totals(registry: CollectorRegistry) -> None:
    """Without Prometheus, too; none is exported where SGLang exports none."""
    totals = monitor(*EVERYTHING, exports=False).totals()
    assert not samples(registry)
    sums = {"particles": 16, "steps": 8, "kept_columns": 6, "emitted_tokens": 9}
    alarms = dict.fromkeys(["useless_drafts", "useless_drafts_from"])
    means = {"mean_ess_ratio": 0.625, **alarms} | {f"mean_{name}": sums[name] / 3 for name in sums}
    assert totals == {**EXPECTED, **means, "weighed_rounds": 2}
    nothing = Monitor(interval=1).totals()
    assert [nothing[name] for name in means] == [None] * len(means)
    monitor(*EVERYTHING)
    found = samples(registry)
    assert {name: found[f"{name}_total"] for name in EXPECTED} == EXPECTED
    assert {total.name for total in metrics.COUNTERS} == set(EXPECTED)


def test_the_ess_is_observed_where_weights_can_be_uneven(registry: CollectorRegistry) -> None:
    """Not where a request is verified or greedy, one particle has no rival, or logits are NaN."""
    lone = played(particles_sum=1, ess_sum=1.0)
    lost = played(ess_sum=math.nan)
    monitor(*EVERYTHING, [lone, lost, played(weighs=False), played(greedy=True, ess_sum=4.0)])
    found = samples(registry)
    assert (found["ess_ratio_count"], found["ess_ratio_sum"]) == (2, 1.25)
    assert (found["ess_ratio_bucket 0.2"], found["ess_ratio_bucket 0.3"]) == (0, 1)
    assert (found["ess_ratio_bucket 0.95"], found["ess_ratio_bucket 1.0"]) == (1, 2)


def test_all_metrics_are_there_before_the_first_round(registry: CollectorRegistry) -> None:
    """Else the first events are lost to `rate`, which sees no increase from nothing."""
    monitor()
    found = samples(registry)
    assert {f"{total.name}_total" for total in metrics.COUNTERS} <= set(found)
    assert {f"{measure.name}_bucket +Inf" for measure in metrics.HISTOGRAMS} <= set(found)
    assert not any(value for name, value in found.items() if not name.endswith("_created"))
    assert ":" not in metrics.PREFIX, "Prometheus 2 and 3 would read names in two ways"


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_round_is_booked_by_what_it_gained_and_whether_it_is_greedy(is_greedy: bool) -> None:
    req = begun({}, [])
    watching = mock.Mock()
    req.smc_state = RequestState.of(0, RequestConfig(num_particles=4, greedy=is_greedy))
    req.smc_state.counters = [*gains(rounds_ct=3, ess_sum=10)]
    result = SMCBatchResult.of(outcome_of(1), monitor=watching, budgets=[])
    result._take(0, req, 0, [], [*gains(rounds_ct=4, ess_sum=12.5)])
    (one,) = watching.add.call_args.args
    assert (one.is_greedy, one.gained) == (is_greedy, gains(rounds_ct=1, ess_sum=2.5))


@pytest.mark.parametrize(
    ("one", "shown"), [({}, "0.50"), ({"weighs": False}, "-"), ({"greedy": True}, "-")]
)
def test_the_log_has_one_line_an_interval(
    caplog: pytest.LogCaptureFixture, one: dict[str, bool], shown: str
) -> None:
    """A prefill that fails shows in the next one; wrong guesses of greedy requests are no alarm."""
    others = [
        played(weighs=False, ess_sum=4.0, narrow_ct=1, nan_ct=3, resample_ct=1),
        played(greedy=True, ess_sum=4.0, all_zero_ct=1),
    ]
    monitor(*[[played(**one)]] * 2, interval=2, exports=False, logs=False)
    found = monitor([played(**one, all_zero_ct=1)], interval=2, exports=False)
    assert not caplog.messages
    for batch in (others, [], []):
        found.count_failed_prefill()
        for each in batch:
            found.add(each)
        found.end_round()
    all_zero = int("greedy" not in one)
    numbers = r" ([-.0-9]+),"
    assert [re.findall(numbers, line)[:6] for line in caplog.messages] == [
        ["3", shown, "0.33", "1", str(all_zero), "4"],
        ["0", "-", "0.00", "0", "0", "2"],
    ]
    assert found.totals()["all_zero_rounds"] == all_zero


def test_gauges_tell_the_tilt_once_there_is_one(registry: CollectorRegistry) -> None:
    """A gauge that shows 0 before would say that answers are the target's own."""
    found = monitor()
    found.end_answer(answer(information=0.0)._replace(watched_ct=0.0))
    assert not {gauge.name for gauge in metrics.GAUGES} & set(samples(registry))
    found.end_answer(answer(tilt=0.5, count=3))
    shown = samples(registry)
    assert [shown[gauge.name] for gauge in metrics.GAUGES] == [0.5, 0.5, 0.25]
    found.end_answer(answer("auto", tilt=-0.5, count=3))
    assert samples(registry)["tilt"] == 0.0
    tilts = {name: of["tilt"] for name, of in found.fidelity().items()}
    assert tilts == {"all": 0.0, "smc": 0.5, "auto": -0.5}


@pytest.mark.parametrize(
    ("stream", "emitted", "measured"),
    [
        # Rounds that emit nothing make the silence longer, not shorter; prefill's token has no gap.
        (True, [(3, 1), (0.5, 0), (1, 0), (2.5, 9), (0.25, 2)], (2, 4.25, 3, 12)),
        (True, [(0, 1), (1, 9, 4)], (1, 1.0, 2, 5)),  # tokens behind an end are in no chunk
        (False, [(0, 1), (1, 9)], (0, 0, 0, 0)),  # an answer that comes as one has none
    ],
)
def test_the_gaps_and_sizes_of_a_streams_chunks(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    emitted: list[tuple],
    measured: tuple[float, ...],
) -> None:
    """Of what prefill and rounds emit: seconds, tokens, and those of them that an end keeps."""
    req = begun({}, [])
    seconds = [100.0]
    req.stream = stream
    watching = Monitor(1000, now=lambda: seconds[0])
    watching.report_as(reporter())
    monkeypatch.setattr(process.active, "worker", SimpleNamespace(monitor=watching))
    for after, num_tokens, *kept in emitted:
        seconds[0] += after
        req.output_ids_through_stop = req.output_ids + [5] * (kept or [num_tokens])[0]
        req.output_ids = req.output_ids + [5] * num_tokens
        update_finish_state(lambda *_: None, req, num_tokens)
    found = samples(registry)
    names = ("chunk_gap_seconds", "chunk_tokens")
    assert measured == tuple(found[f"{n}_{part}"] for n in names for part in ("count", "sum"))


def test_waits_for_potentials_are_measured(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By those who ask on a server, of which `Call.answers` is the only way to wait."""
    monkeypatch.setattr(process, "potentials_of", lambda _: ("slow=steered:Slow",))
    monkeypatch.setattr(process, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    process.open_runners(cast(Any, None), SMCConfig(), monitor())["slow"].waited(0.25)
    parts = ("sum", "bucket 0.2", "bucket 0.5")
    found = samples(registry)
    assert [found[f"potential_wait_seconds_{part}"] for part in parts] == [0.25, 0, 1]


def test_a_prefill_that_fails_is_counted(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the hook that ends such a request: a broken model shows in its prefill first."""
    # a code of `Failure` in place of the first token
    req = begun({}, [-1])
    found = monitor()
    req.output_ids_through_stop = req.output_ids
    monkeypatch.setattr(process.active, "worker", SimpleNamespace(monitor=found))
    update_finish_state(lambda *_: None, req)
    totals = found.totals()
    assert (totals["nan_rounds"], totals["rounds"]) == (1, 0)
    assert samples(registry)["nan_rounds_total"] == 1


def test_other_metric_classes_are_taken_where_the_collector_has_them() -> None:
    given = reporter()
    made = mock.Mock()
    given.metrics_collector._counter_cls = given.metrics_collector._histogram_cls = made
    Monitor(interval=1).report_as(given)
    assert made.call_count == len(metrics.COUNTERS) + len(metrics.HISTOGRAMS)


# --- How far answers were watched to be from the target


def answer(
    mode: str = "smc", tilt: float = 0.3, information: float = 4.0, count: int = 10
) -> AnswerFidelity:
    return AnswerFidelity(mode, 0.5, tilt * information, information, 0.25 * count, count)


def sums_of(*answers: AnswerFidelity) -> Sums:
    return functools.reduce(lambda total, one: total.plus(Sums.of(one)), answers, Sums())


def test_a_tilt_weighs_answers_by_what_they_say() -> None:
    sums = sums_of(answer(tilt=1.0, information=9.0), answer(tilt=0.0, information=1.0, count=30))
    assert sums.tilt == 0.9
    assert sums.innovation == 0.25
    assert (sums.answers, sums.watched, sums.information) == (2, 40, 10.0)


def test_nothing_watched_is_no_tilt_of_zero() -> None:
    """Who was not watched is left out."""
    watched = FidelityWindows()
    watched.add(AnswerFidelity("smc", 0.5, 0.0, 0.0, 0.0, 0.0))
    assert watched.all == Sums()
    assert list(watched.as_dict()) == [ALL]
    assert (Sums().tilt, Sums().tilt_error, Sums().innovation, str(Sums())) == (None,) * 3 + ("-",)
    sums = sums_of(answer(information=0.0))  # draft and target are one
    assert (sums.tilt, sums.tilt_error) == (None, None)
    assert sums.innovation is not None


def test_the_standard_error_is_the_larger_of_what_laws_and_answers_say() -> None:
    """And it is that of the tilt: the spread of 400 windows errs by 1 in 28, five times 18 %."""
    alike = sums_of(*[answer(tilt=0.3)] * 100)
    assert alike.tilt_error == pytest.approx(400**-0.5)
    apart = sums_of(*[answer(tilt=3.3), answer(tilt=-2.7)] * 50)
    assert apart.tilt == pytest.approx(0.3)
    assert apart.tilt_error == pytest.approx(math.sqrt(100 * (3.0 * 4.0) ** 2) / 400)
    drawn = random.Random(0)
    tilts = []
    for _ in range(400):
        of = [drawn.uniform(1, 7) for _ in range(60)]
        sums = sums_of(*(answer("exact", drawn.gauss(0, i**-0.5), i) for i in of))
        assert sums.tilt is not None and sums.tilt_error is not None
        tilts.append(sums.tilt / sums.tilt_error)
    assert math.sqrt(sum(tilt**2 for tilt in tilts) / 400) == pytest.approx(1.0, abs=0.18)


def test_a_window_lets_the_oldest_half_go() -> None:
    window = Window(information=40.0)
    whole = [window.add(answer(tilt=float(i >= 10))) for i in range(20)]
    assert [one is not None for one in whole] == [i % 10 == 9 for i in range(20)]
    assert whole[9] == sums_of(*[answer(tilt=0.0)] * 10)
    assert whole[19] == sums_of(*[answer(tilt=1.0)] * 10), "no answer is judged twice"
    assert window.sums == sums_of(*[answer(tilt=1.0)] * 5)
    # Answers that say little fill one by their number.
    window = Window(most=6)
    whole = [window.add(answer(information=1e-9)) for _ in range(12)]
    assert [place for place, one in enumerate(whole) if one is not None] == [5, 11]


@pytest.mark.parametrize(
    ("mode", "zero", "errors", "advice"),
    [
        ("exact", 0.0, fidelity.FAULT, ("report", "/server_info")),
        ("exact", 0.0, -fidelity.FAULT, ("report", "/server_info")),
        ("smc", 0.5, 2.0, ("-mode auto", "exact", "evidence-threshold", "draft-model")),
    ],
)
def test_tilts_are_told_where_they_are_surely_wrong(
    mode: str, zero: float, errors: float, advice: tuple[str, ...]
) -> None:
    """Exact answers five standard errors from zero, others where they are more than half way."""
    tilts = [zero + errors * by * fidelity.INFORMATION**-0.5 for by in (0.98, 1.02)]
    near, far = (sums_of(*[answer(mode, tilt)] * 250) for tilt in tilts)
    assert fidelity.warning_of(mode, near) is None
    text = fidelity.warning_of(mode, far) or ""
    assert all(word in text for word in advice) and (mode == "smc" or str(far) in text)
    assert fidelity.warning_of("smc", sums_of(*[answer(tilt=-2.0)] * 250)) is None


def test_a_mode_is_warned_of_once_in_a_while_and_by_itself() -> None:
    clock = [0.0]
    watched = FidelityWindows(lambda: clock[0], lambda: Window(information=8.0))
    far = answer(tilt=3.0)
    fine = answer("auto", tilt=0.0)

    def told() -> list[bool]:
        return [watched.add(one) is not None for one in (far, fine, far, fine)]

    assert told() == [False, False, True, False]
    assert told() == [False] * 4, "but not so soon again"
    clock[0] += fidelity.WARNING_SECONDS
    assert told() == [False, False, True, False]
    found = watched.as_dict()
    assert set(found) == {ALL, "smc", "auto"}
    assert found["auto"]["tilt"] == 0.0
    assert found["smc"]["tilt"] == 3.0
    assert {found[ALL]["tilt"], found[ALL]["answers"]} != {None, 0}


@pytest.mark.parametrize("logs", [True, False])
def test_the_log_has_the_tilt_and_its_faults(caplog: pytest.LogCaptureFixture, logs: bool) -> None:
    found = monitor(interval=1, exports=False, logs=logs)
    for number in range(250):
        if number == 1:
            found.end_round()
        found.end_answer(answer("exact", tilt=0.5))
    assert ("tilt: 0.50 +- 0.50" in caplog.text) == logs
    assert ("This is a fault" in caplog.text) == logs


def test_an_answer_is_taken_in_once_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (True, False):
        monitor = Monitor(interval=1)
        state = RequestState.of(0, RequestConfig(num_particles=4))
        monkeypatch.setattr(process.active, "worker", SimpleNamespace(monitor=monitor))
        watched = {"tilt_sum": 1.0, "tilt_information": 4.0, "watched_ct": 2.0}
        state.counters = [watched.get(name, 0.0) for name in Counters._fields]
        req = begun({})
        req.smc_state = state
        req.stream = stream
        req.output_ids = req.output_ids_through_stop = [5]
        for has_ended in (False, True, True):
            req.finished = lambda has_ended=has_ended: has_ended
            update_finish_state(lambda *_: None, req, 1)
            assert monitor.fidelity()[ALL]["answers"] == has_ended
        assert monitor.fidelity()["smc"]["tilt"] == 0.25
        assert req.customized_info["spec_smc_tilt"] == [0.25]
