"""The simulator of load: arithmetic where nothing is left to chance, and laws where it is."""

import json
from pathlib import Path

import numpy as np
import pytest
from load.run import (
    ADAPTIVE,
    BY_REQUEST,
    EXACT,
    HEAD,
    PLAIN,
    TRACES,
    Adaptive,
    ByRequest,
    Fixed,
    LoadRequest,
    Measured,
    PrefillTimes,
    RoundKind,
    main,
    numbers_of,
    play,
    requests_of,
    rows_of,
)

from sglang_smc.options.policy import Curve
from sglang_smc.options.request import OFF, Budget

PREFILL = PrefillTimes(Curve(((1, 0.5), (2, 1.0))), latency=0.25)


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured()


def by_size(*seconds: float) -> Curve:
    return Curve(tuple(enumerate(seconds, start=1)))


@pytest.mark.parametrize(("chance", "rounds"), [(0.0, 100), (1.0, 25)])
def test_one_request_takes_its_prefill_and_its_rounds(chance: float, rounds: int) -> None:
    one = LoadRequest(arrives=2.0, length=101, chance=chance)
    play(Fixed(RoundKind(by_size(0.01), num_steps=3)), PREFILL, [one], most=1)
    seconds = 0.5 + 0.01 * rounds
    assert list(numbers_of([one]).values()) == pytest.approx([101 / seconds, 750, seconds])


def test_who_waits_joins_when_another_ends_and_holds_up_the_rest() -> None:
    """Two prefills and 9 rounds of two; a prefill and 10 rounds of two; 9 rounds of one."""
    requests = [LoadRequest(0.0, length, chance=0.0) for length in (10, 20, 20)]
    play(Fixed(RoundKind(by_size(0.1, 0.2))), PREFILL, requests, most=2)
    assert [one.ends for one in requests] == pytest.approx([2.8, 5.3, 6.2])


def test_a_round_keeps_what_its_chances_say() -> None:
    draw, chances = np.random.default_rng(0), np.array([0.0, 0.5, 0.9, 1.0])
    kept = np.stack([RoundKind(by_size(1), 4, loss=0.5).keep(chances, draw) for _ in range(4000)])
    each = 1 - (1 - chances) / 2
    expected = [sum(chance**i for i in range(1, 5)) for chance in each]
    assert kept.mean(0) == pytest.approx(expected, abs=4 * 2 / 4000**0.5)
    assert kept.max() == 4


@pytest.mark.parametrize("name", TRACES)
def test_all_tokens_are_served_to_all_in_their_order(name: str, measured: Measured) -> None:
    trace, adapted = TRACES[name], measured.budgets()
    for decoder in (Fixed(adapted[Budget(4, 16)]), Adaptive(adapted), ByRequest(adapted)):
        requests = requests_of(trace, 8, measured.chances, adapted[OFF].seconds)
        play(decoder, PREFILL, requests, most=8)
        assert [one.tokens for one in requests] == [one.length for one in requests]
        assert all(one.arrives < one.first <= one.ends + PREFILL.latency for one in requests)
        firsts = [one.first for one in sorted(requests, key=lambda one: one.arrives)]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("users", [1, 16, 64])
def test_the_policy_loses_a_hundredth_on_useless_drafts(users: int, measured: Measured) -> None:
    """Of requests that keep nothing; 0.02 more for what it has to learn first."""
    plain, adapted = measured.shapes()[PLAIN], measured.budgets()
    more = adapted[OFF].seconds.at(32) / plain.seconds.at(32)
    assert 1.0 < more < 1.1

    def speed(decoder: Fixed | Adaptive) -> float:
        requests = [LoadRequest(0.0, 2000, chance=0.0) for _ in range(users)]
        play(decoder, PREFILL, requests, most=users)
        return numbers_of(requests)["simulated_tokens_per_second"]

    assert speed(Adaptive(adapted)) > 0.97 * speed(Fixed(plain)) / more


def test_shapes_yield_the_tokens_and_take_the_time_that_were_measured(measured: Measured) -> None:
    shapes, chances = measured.shapes(), np.array(measured.chances * 500)
    draw = np.random.default_rng(0)
    for budget, tokens in zip(EXACT, (6.19, 7.55, 11.07), strict=True):
        kept = shapes[HEAD.format(*budget)].keep(chances, draw)
        # Tokens over passes, of answers of one length.
        each = 1 + kept.reshape(500, -1).mean(0)
        assert 1 / (1 / each).mean() == pytest.approx(tokens, rel=0.01)
    seconds = shapes[HEAD.format(8, 8)].seconds
    assert [1000 * seconds.at(size) for size in (1, 8)] == pytest.approx([8.35, 20.4], rel=0.01)


def test_chances_come_from_answers(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a cell's file as other benchmarks write it; one that drafts nothing says so."""
    path = tmp_path / "cell.jsonl"
    smc = {"num_particles": 1, "num_steps": 8, "mode": "exact"}
    infos = [{"completion_tokens": 91, "spec_verify_ct": n} for n in (10, 30, 90)]
    lines = [{"smc": smc}, *({"index": i, "info": info} for i, info in enumerate(infos))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sure, middling, never = measured.read(path)
    assert never < 0.1 < 0.6 < middling < 0.75 < 0.99 < sure
    path.write_text('{"smc": null}\n')
    assert main(["--answers", str(path), "--output-dir", str(tmp_path)]) == 1
    assert "0 answers with drafts, of N = 0; allowed" in capsys.readouterr().err


def test_a_report_calls_every_number_simulated(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("load.run.SEEDS", 1)
    assert main(["--users", "1", "2", "--output-dir", str(tmp_path)]) == 0
    page = (tmp_path / "load.md").read_text()
    heads = [line for line in page.splitlines() if line.endswith(", by users | 1 | 2 |")]
    assert len(heads) == 3 * len(TRACES) and all("| simulated " in line for line in heads)
    columns = (tmp_path / "load.csv").read_text().splitlines()[0].split(",")
    assert sum(column.startswith("simulated_") for column in columns) == 4
    rows = rows_of(measured, measured.chances, [1])
    plain = [row for row in rows if row.system == PLAIN]
    assert [row.simulated_to_plain for row in plain] == [1.0] * len(TRACES)
    assert {ADAPTIVE, BY_REQUEST} < {row.system for row in rows}
