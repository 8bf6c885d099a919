"""The numbers of the demo's table, from canned answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat import Answer, Pass
from results import (
    answer_lines,
    ess_share,
    provenance,
    resample_rate,
    summarise,
    table,
    tokens_per_pass,
    wilson,
)
from scipy.stats import binomtest


def plain_info(completion_tokens: int) -> dict[str, Any]:
    return {"completion_tokens": completion_tokens}


def smc_info(completion_tokens: int, rounds: int, resampled: int, ess: float) -> dict[str, Any]:
    return {
        "completion_tokens": completion_tokens,
        "spec_verify_ct": rounds,
        "spec_smc_num_particles": 8,
        "spec_smc_rounds_ct": rounds,
        "spec_smc_resample_ct": resampled,
        "spec_smc_ess_mean": ess,
    }


def canned_pass(infos: list[dict[str, Any]], right: list[bool], seconds: float) -> Pass:
    answers = [
        Answer(
            index=index,
            request_id=f"id{index}",
            text="#### 1",
            right=is_right,
            finish_reason="stop",
            seconds_to_first=0.1,
            seconds=0.5,
        )
        for index, is_right in enumerate(right)
    ]
    by_id = {answer.request_id: info for answer, info in zip(answers, infos, strict=True)}
    return Pass(answers, seconds, by_id)


@pytest.fixture
def smc_pass() -> Pass:
    # 90 tokens after the first ones, in 20 rounds.
    infos = [smc_info(51, 10, 5, ess=4.0), smc_info(41, 10, 1, ess=6.0)]
    return canned_pass(infos, [True, False], seconds=4.0)


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (1, 10), (55, 100), (299, 300), (300, 300)])
def test_wilson_interval_is_scipys(hits: int, n: int) -> None:
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    interval = wilson(hits, n)
    assert interval.mean == hits / n
    assert interval.low == pytest.approx(expected.low, abs=1e-7)
    assert interval.high == pytest.approx(expected.high, abs=1e-7)


def test_plain_decoding_makes_one_token_a_pass() -> None:
    assert tokens_per_pass([plain_info(7), plain_info(31)]) == 1.0


def test_answers_of_one_token_need_no_decoding_pass() -> None:
    assert tokens_per_pass([plain_info(1)]) == 0.0


def test_smc_row(smc_pass: Pass) -> None:
    row = summarise("SMC", smc_pass)
    assert row.accuracy == wilson(1, 2)
    assert row.tokens_per_target_pass == 90 / 20
    assert row.tokens_per_second == 92 / 4
    assert row.seconds_to_first == pytest.approx(0.1)
    assert row.seconds_per_request == pytest.approx(0.5)
    assert row.ess_share == pytest.approx(5 / 8)
    assert row.resample_rate == 6 / 20


def test_ess_is_weighted_by_rounds() -> None:
    infos = [smc_info(100, rounds=30, resampled=3, ess=8.0), smc_info(20, 10, 7, ess=4.0)]
    assert ess_share(infos) == pytest.approx((30 * 1.0 + 10 * 0.5) / 40)
    assert resample_rate(infos) == 10 / 40


def test_plain_row_has_no_particles() -> None:
    run = canned_pass([plain_info(5)], [True], seconds=1.0)
    row = summarise("draft", run, uses_target=False)
    assert (row.ess_share, row.resample_rate, row.tokens_per_target_pass) == (None, None, None)


def test_table_has_a_line_for_each_row(smc_pass: Pass) -> None:
    plain = canned_pass([plain_info(5)], [True], seconds=1.0)
    text = table([summarise("AR", plain, uses_target=False), summarise("SMC", smc_pass)])
    ar, smc = text.splitlines()[-2:]
    assert ar.split() == "AR 100.0% [20.7, 100.0] 1 - 5 100 ms 0.50 s - -".split()  # noqa: SIM905
    assert smc.split()[0] == "SMC" and smc.split()[-2:] == ["0.62", "30%"]
    assert max(map(len, text.splitlines())) <= 100


def test_answer_lines_join_both_sides(smc_pass: Pass) -> None:
    lines = json.loads(json.dumps(answer_lines("SMC", smc_pass)))
    assert [line["server"] for line in lines] == ["SMC", "SMC"]
    assert lines[1]["meta_info"]["completion_tokens"] == 41


def test_provenance_outside_a_repository(tmp_path: Path) -> None:
    found = provenance(tmp_path)
    assert found.keys() >= {"argv", "date", "git_sha", "versions", "platform", "hardware"}
    assert found["git_sha"] is None
    assert found["versions"]["sglang"]
    json.dumps(found)
