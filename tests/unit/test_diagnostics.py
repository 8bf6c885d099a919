"""Counters of a run, and what the client reads of them."""

import logging

import pytest
import torch

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.rounds import BlockCut
from sglang_smc.state.counters import (
    LOW_ESS,
    LOW_ESS_ROUNDS,
    LOW_ESS_SECONDS,
    Counters,
    CounterTable,
    IntervalLog,
    LowESSWarning,
    gained,
    meta_info,
    zero_counters,
)

ANCESTORS = 3


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that ran before in this process may have left the root logger at errors alone."""
    caplog.set_level(logging.INFO)


def add(
    table: CounterTable,
    rows: list[int],
    ess: list[float],
    killed: list[int] | None = None,
    **flags: list[bool],
) -> list:
    def flag(name: str) -> torch.Tensor:
        return torch.tensor(flags.get(name, [False] * len(rows)))

    cut = BlockCut(
        num_columns=torch.zeros(len(rows), dtype=torch.int64),
        log_weights=torch.zeros(len(rows), 4, dtype=torch.float64),
        ess=torch.tensor(ess, dtype=torch.float64),
        resample=flag("resampled"),
        all_zero=flag("all_zero"),
    )
    totals = table.add_round(
        torch.tensor(rows),
        cut=cut,
        failed=flag("failed"),
        verified=flag("verified"),
        killed=torch.tensor(killed or [0] * len(rows)),
        narrowed=flag("narrowed"),
        ancestors=torch.full((len(rows),), ANCESTORS),
        num_particles=torch.tensor(rows) * 2,
        num_steps=torch.tensor(rows) * 3,
        fidelity=torch.tensor(rows, dtype=torch.float64).unsqueeze(1) * torch.arange(1, 5),
        log_evidence=torch.tensor([-float(row) for row in rows], dtype=torch.float64),
    )
    return totals.tolist()


def started(rows: list[int]) -> CounterTable:
    table = CounterTable(5, "cpu", TORCH)
    table.begin(torch.tensor(rows), torch.tensor([zero_counters(8)] * len(rows)).double())
    return table


def test_every_event_has_its_own_counter() -> None:
    table = started([1, 2, 3])
    add(table, [3, 1], [4.0, 2.0], [2, 1], resampled=[True, False])
    add(table, [1, 3], [3.0, 1.0], narrowed=[False, True], all_zero=[True, False])
    add(table, [2], [5.0], verified=[True], failed=[True])
    totals = add(table, [1, 2, 3], [1.0, 1.0, 1.0], [4, 3, 0], resampled=[True, True, True])
    by_row = [Counters(*row) for row in totals]
    assert [c.rounds_ct for c in by_row] == [3, 2, 3]
    assert [c.resample_ct for c in by_row] == [1, 1, 2]
    assert [c.narrow_ct for c in by_row] == [0, 0, 1]
    assert [c.all_zero_ct for c in by_row] == [1, 0, 0]
    assert [c.nan_ct for c in by_row] == [0, 1, 0]
    assert [c.exact_ct for c in by_row] == [0, 1, 0]
    assert [c.killed_ct for c in by_row] == [5, 3, 2]
    assert [c.ess_sum for c in by_row] == [6.0, 6.0, 6.0]
    assert [c.particles_sum for c in by_row] == [3 * 2, 2 * 4, 3 * 6]
    assert [c.steps_sum for c in by_row] == [3 * 3, 2 * 6, 3 * 9]


def test_the_lowest_ess_stays_and_the_ancestors_are_the_last() -> None:
    table = started([1])
    for ess in (5.0, 2.0, 4.0):
        totals = Counters(*add(table, [1], [ess])[0])
    assert totals.ess_min == 2.0
    assert totals.ancestors == ANCESTORS


def test_log_evidence_is_taken_over_not_added_up() -> None:
    """The population carries the running total already."""
    table = started([2])
    add(table, [2], [1.0])
    assert Counters(*add(table, [2], [1.0])[0]).log_evidence == -2.0


def test_a_retracted_request_goes_on_counting() -> None:
    table = started([1])
    carried = add(table, [1], [3.0], resampled=[True])
    table.begin(torch.tensor([4]), torch.tensor(carried, dtype=torch.float64))
    counters = Counters(*add(table, [4], [1.0], resampled=[True])[0])
    assert (counters.rounds_ct, counters.resample_ct, counters.ess_sum) == (2, 2, 4.0)


TOTALS = Counters(4, 2, 1, 3, 7, 5, 9, 10.0, 22, 11, 1.5, 2.0, 0.5, 2.0, -0.75, 3, -0.75)


def test_meta_info_is_prefixed_and_has_plain_numbers() -> None:
    config = RequestConfig(num_particles=6, num_steps=3)
    found = meta_info([float(value) for value in TOTALS], config, 3)
    assert found == {
        "spec_smc_mode": "smc",
        "spec_smc_num_particles": 6,
        "spec_smc_num_steps": 3,
        "spec_smc_evidence_threshold": 0.5,
        "spec_smc_particles_mean": 5.5,
        "spec_smc_steps_mean": 2.75,
        "spec_smc_rounds_ct": 4,
        "spec_smc_replayed_ct": 3,
        "spec_smc_resample_ct": 2,
        "spec_smc_narrow_ct": 1,
        "spec_smc_all_zero_ct": 3,
        "spec_smc_nan_ct": 7,
        "spec_smc_exact_ct": 5,
        "spec_smc_ess_mean": 2.5,
        "spec_smc_ess_min": 1.5,
        "spec_smc_distinct_ancestors": 2,
        "spec_smc_tilt": 0.25,
        "spec_smc_tilt_information": 2.0,
        "spec_smc_innovation": -0.25,
        "spec_smc_watched_ct": 3,
        "spec_smc_log_evidence": -0.75,
    }
    counts = [v for k, v in found.items() if k.endswith(("_ct", "_ancestors"))]
    assert all(type(count) is int for count in counts)


@pytest.mark.parametrize(
    ("mode", "log_evidence"), [("smc", -0.75), ("exact", -0.75), ("mixed", None), ("auto", None)]
)
def test_only_where_all_is_weighed_or_all_verified_has_a_text_evidence(
    mode: str, log_evidence: float | None
) -> None:
    found = meta_info(list(TOTALS), RequestConfig(mode=mode), 0)
    assert found["spec_smc_mode"] == mode
    assert found["spec_smc_log_evidence"] == log_evidence


def test_before_the_first_round_all_particles_count() -> None:
    """A text of one token ends in prefill: no round, no division by zero."""
    found = meta_info(zero_counters(5), RequestConfig(num_particles=5), 0)
    assert found["spec_smc_ess_mean"] == found["spec_smc_ess_min"] == 5.0
    assert found["spec_smc_distinct_ancestors"] == found["spec_smc_particles_mean"] == 5
    assert found["spec_smc_steps_mean"] == 8
    assert found["spec_smc_rounds_ct"] == 0
    unknown = "tilt", "tilt_information", "innovation"
    assert [found[f"spec_smc_{name}"] for name in unknown] == [None] * 3, "0 would be the target's"
    assert found["spec_smc_watched_ct"] == 0


def test_the_log_has_one_line_an_interval_and_begins_again_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = IntervalLog(interval=2)
    log.add(row(rounds_ct=1, resample_ct=1, ess_sum=2, particles_sum=4), is_weighed=True)
    log.end_round("-")
    assert not caplog.messages
    log.add(row(rounds_ct=1, narrow_ct=1, nan_ct=3, ess_sum=4, particles_sum=4), is_weighed=True)
    log.end_round("-")
    assert len(caplog.messages) == 1
    line = caplog.messages[0]
    for part in (
        "#round: 2",
        "ess / particles: 0.75",
        "resample rate: 0.50",
        "#narrowed: 1",
        "#nan: 3",
    ):
        assert part in line
    log.add(row(rounds_ct=1, ess_sum=4, particles_sum=4), is_weighed=True)
    log.end_round("-")
    log.end_round("-")
    assert "#round: 1, ess / particles: 1.00, resample rate: 0.00" in caplog.messages[1]


def test_an_interval_without_rounds_is_no_division_by_zero() -> None:
    IntervalLog(interval=1).end_round("-")


def test_what_a_round_gains_is_the_difference_of_totals() -> None:
    before = [*row(rounds_ct=3, ess_sum=10, killed_ct=2)]
    after = [*row(rounds_ct=4, ess_sum=12.5, killed_ct=5)]
    assert gained(before, after) == row(rounds_ct=1, ess_sum=2.5, killed_ct=3)


def row(**values: float) -> Counters:
    return Counters(**{**dict.fromkeys(Counters._fields, 0.0), **values})


class Clock:
    """A clock that stands still between tests' words."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def play(warning: LowESSWarning, share: float, num_rounds: int, num_particles: int = 8) -> None:
    ess = 1 + share * (num_particles - 1)
    for _ in range(num_rounds):
        warning.add(row(rounds_ct=1, ess_sum=ess, particles_sum=num_particles, steps_sum=6))


@pytest.mark.parametrize("num_particles", [2, 8, 64])
def test_a_low_ess_is_warned_of_with_advice(
    caplog: pytest.LogCaptureFixture, num_particles: int
) -> None:
    """For two particles, too, whose ESS / N is never below a half."""
    play(LowESSWarning(), LOW_ESS * 0.9, LOW_ESS_ROUNDS, num_particles)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    ess = 1 + LOW_ESS * 0.9 * (num_particles - 1)
    assert f"{ess:.1f} of {num_particles}.0 particles, with 6.0 tokens" in record.message
    for flag in (
        *("--speculative-smc-mode", "--speculative-num-steps", "--speculative-smc-resample-at"),
        *("--speculative-smc-num-particles", "--speculative-draft-model-path"),
    ):
        assert flag in record.message


def test_no_warning_before_enough_rounds_or_above_the_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = LowESSWarning()
    play(warning, 0.0, LOW_ESS_ROUNDS - 1)
    play(warning, 1.0, 1)
    assert len(caplog.messages) == 1, "the mean, not the last round"
    caplog.clear()
    play(warning, LOW_ESS * 1.1, 3 * LOW_ESS_ROUNDS)
    play(warning, 0.0, LOW_ESS_ROUNDS - 1)
    assert not caplog.messages


def test_the_warning_is_not_repeated_within_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    warning = LowESSWarning(clock)
    play(warning, 0.0, 3 * LOW_ESS_ROUNDS)
    clock.seconds = LOW_ESS_SECONDS - 1
    play(warning, 0.0, LOW_ESS_ROUNDS)
    assert len(caplog.messages) == 1
    clock.seconds = LOW_ESS_SECONDS
    play(warning, 0.0, LOW_ESS_ROUNDS)
    assert len(caplog.messages) == 2
