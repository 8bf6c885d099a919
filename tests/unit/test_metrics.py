"""What a server counts of its rounds, and shows on /metrics and in /server_info."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from edit_cases import NEUTRAL
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from toy_laws import EOS, languages
from toy_worker import ToyWorker

from sglang_smc import process
from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches.request_state import update_finish_state
from sglang_smc.requests.state import RequestState
from sglang_smc.state import counters
from sglang_smc.state.counters import Counters
from sglang_smc.state.monitor import ESS_RATIO_BUCKETS, PREFIX, TOTALS, Monitor, Played

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Where metrics of the test go, in place of the process's one registry."""
    fresh = CollectorRegistry()
    for name in ("Counter", "Histogram"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(
            prometheus_client, name, lambda kind=kind, **given: kind(registry=fresh, **given)
        )
    return fresh


def reporter(*, exports: bool = True, logs: bool = True) -> Any:
    collector = SimpleNamespace(labels=LABELS, _counter_cls=None, _histogram_cls=None)
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
    **gains: float,
) -> Played:
    given = {"rounds_ct": 1, "particles_sum": 4, "ess_sum": 2.0, **gains}
    zeros = dict.fromkeys(Counters._fields, 0.0)
    return Played(Counters(**{**zeros, **given}), weighs, kept, emitted, replayed)


def monitor(*rounds: list[Played], **reporting: bool) -> Monitor:
    found = Monitor(interval=1000)
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
    [
        played(
            kept=2, emitted=9, collapse_ct=1, all_zero_ct=1, nan_ct=1, particles_sum=8, ess_sum=8.0
        )
    ],
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
    "forced_collapses": 1,
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
    """Not where a request is verified, one particle has no rival, or logits are NaN."""
    lone, lost = played(particles_sum=1, ess_sum=1.0), played(ess_sum=math.nan)
    monitor(*EVERYTHING, [lone, lost, played(weighs=False)])
    found = samples(registry)
    assert (found["ess_ratio_count"], found["ess_ratio_sum"]) == (2, 1.25)
    assert (found["ess_ratio_bucket 0.2"], found["ess_ratio_bucket 0.3"]) == (0, 1)
    assert (found["ess_ratio_bucket 0.95"], found["ess_ratio_bucket 1.0"]) == (1, 2)


def test_all_metrics_are_there_before_the_first_round(registry: CollectorRegistry) -> None:
    """Else the first events are lost to `rate`, which sees no increase from nothing."""
    monitor()
    found = samples(registry)
    assert {f"{total.name}_total" for total in TOTALS} <= set(found)
    assert f"ess_ratio_bucket {ESS_RATIO_BUCKETS[0]}" in found
    assert not any(value for name, value in found.items() if not name.endswith("_created"))


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
    req.grammar = req.custom_logit_processor = None
    req.sampling_params = SimpleNamespace(**NEUTRAL)
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
    assert len(made) == len(TOTALS) + 1


@pytest.mark.parametrize(
    ("logs", "weighs", "num_lines"), [(True, True, 2), (True, False, 1), (False, True, 0)]
)
def test_log_and_warning_come_from_one_rank_and_of_weighed_rounds(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    logs: bool,
    weighs: bool,
    num_lines: int,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(counters, "LOW_ESS_ROUNDS", 2)
    low = [played(weighs=weighs, ess_sum=1.0)]
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
