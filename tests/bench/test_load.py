"""The simulator of load: arithmetic where nothing is left to chance, and laws where it is."""

from pathlib import Path

import numpy as np
import pytest
from gpu import expected
from load.run import (
    ADAPTIVE,
    EXACT,
    FIXED,
    PLAIN,
    REPORT,
    TEXTS,
    TRACES,
    Adaptive,
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
    summary,
)
from study import PUBLISHED, REPOSITORY

from sglang_smc.options.policy import Curve
from sglang_smc.options.request import OFF, Budget

PREFILL = PrefillTimes(Curve(((1, 0.5), (2, 1.0))), latency=0.25)


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured(TEXTS["head"])


def by_size(*seconds: float) -> Curve:
    return Curve(tuple(enumerate(seconds, start=1)))


@pytest.mark.parametrize(("chance", "rounds"), [(0.0, 100), (1.0, 25)])
def test_one_request_takes_its_prefill_and_its_rounds(chance: float, rounds: int) -> None:
    one = LoadRequest(arrives=2.0, length=101, chance=chance)
    play(Fixed(RoundKind(by_size(0.01), num_steps=3)), PREFILL, [one], most=1)
    seconds = 0.5 + 0.01 * rounds
    told = [101 / seconds, seconds, 750, seconds]
    assert list(numbers_of([one]).values()) == pytest.approx(told)


def test_who_waits_joins_when_another_ends_and_holds_up_the_rest() -> None:
    """Two prefills and 9 rounds of two; a prefill and 10 rounds of two; 9 rounds of one."""
    requests = [LoadRequest(0.0, length, chance=0.0) for length in (10, 20, 20)]
    play(Fixed(RoundKind(by_size(0.1, 0.2))), PREFILL, requests, most=2)
    assert [one.ends for one in requests] == pytest.approx([2.8, 5.3, 6.2])


def test_a_round_keeps_what_its_chances_say() -> None:
    draw = np.random.default_rng(0)
    chances = np.array([0.0, 0.5, 0.9, 1.0])
    kept = np.stack([RoundKind(by_size(1), 4, loss=0.5).keep(chances, draw) for _ in range(4000)])
    each = 1 - (1 - chances) / 2
    expected = [sum(chance**i for i in range(1, 5)) for chance in each]
    assert kept.mean(0) == pytest.approx(expected, abs=4 * 2 / 4000**0.5)
    assert kept.max() == 4


@pytest.mark.parametrize("name", TRACES)
def test_all_tokens_are_served_to_all_in_their_order(name: str, measured: Measured) -> None:
    trace = TRACES[name]
    adapted = measured.budgets()
    for decoder in (Fixed(adapted[Budget(8, 16)]), Adaptive(adapted)):
        requests = requests_of(trace, 8, measured.chances, adapted[OFF].seconds)
        play(decoder, PREFILL, requests, most=8)
        assert [one.tokens for one in requests] == [one.length for one in requests]
        assert all(one.arrives < one.first <= one.ends + PREFILL.latency for one in requests)
        firsts = [one.first for one in sorted(requests, key=lambda one: one.arrives)]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("users", [1, 16, 64])
def test_the_policy_loses_a_hundredth_on_useless_drafts(users: int, measured: Measured) -> None:
    """Of requests that keep nothing; 0.02 more for what it has to learn first."""
    plain = measured.shapes()[PLAIN]
    adapted = measured.budgets()
    more = adapted[OFF].seconds.at(32) / plain.seconds.at(32)
    assert 1.0 < more < 1.1

    def speed(decoder: Fixed | Adaptive) -> float:
        requests = [LoadRequest(0.0, 2000, chance=0.0) for _ in range(users)]
        play(decoder, PREFILL, requests, most=users)
        return numbers_of(requests)["simulated_tokens_per_second"]

    assert speed(Adaptive(adapted)) > 0.97 * speed(Fixed(plain)) / more


#: Tokens a pass of each setting, by texts: `bench/results/trees` and `bench/results/real`.
TOKENS = {
    "head": {EXACT.format(1, 8): 6.19, EXACT.format(8, 8): 7.55, EXACT.format(4, 17): 11.07},
    "model": {EXACT.format(1, 8): 4.28, EXACT.format(8, 8): 5.84, EXACT.format(4, 17): 7.10},
}
TREES = {
    "head": {
        "SGLang, EAGLE-3 head, tree 4 / 5 / 8": 3.31,
        "SGLang, EAGLE-3 head, tree 10 / 8 / 72": 5.81,
    },
    "model": {"SGLang, draft model, tree 8 / 8 / 72": 5.25},
}


@pytest.mark.parametrize("texts", TEXTS)
def test_settings_yield_the_tokens_that_were_measured_on_the_same_texts(texts: str) -> None:
    """Red where rejections of one pair are taken for another's: real text had 2.3 of the tree."""
    measured = Measured(TEXTS[texts])
    draw = np.random.default_rng(0)
    shapes = measured.shapes()
    chances = np.array(measured.chances * 500)
    expected_tokens = TOKENS[texts] | TREES[texts]
    assert shapes.keys() == {PLAIN, *expected_tokens}
    for name, tokens in expected_tokens.items():
        kept = shapes[name].keep(chances, draw)
        # Tokens over passes, of answers of one length.
        each = 1 + kept.reshape(500, -1).mean(0)
        assert 1 / (1 / each).mean() == pytest.approx(tokens, rel=0.015), name


@pytest.mark.parametrize("users", [1, 8, 32])
def test_speeds_are_those_of_the_table_for_an_h200(users: int, measured: Measured) -> None:
    """Red where this page ranks settings otherwise than docs/expect.md."""
    tokens = {name: of["0.7"] for name, of in expected.tokens_by_name().items()}
    times = expected.published()
    ours = "`exact`, EAGLE-3 head, N = {}, K = {}"
    names = {EXACT.format(*of): ours.format(*of) for of in FIXED if of != Budget(1, 8)}
    names |= {name: name for name in (PLAIN, *TREES["head"])}
    shapes = measured.shapes()
    for name, listed in names.items():
        ms, _ = expected.milliseconds(times, expected.SHAPES[listed], users)
        chances = measured.chances * (1 if users == 1 else 6)
        requests = [LoadRequest(0.0, 300, chance) for chance in chances]
        play(Fixed(shapes[name]), PrefillTimes(Curve(((1, 0.0),))), requests, most=users)
        found = numbers_of(requests)["simulated_tokens_per_second"]
        told = 1000 * tokens[listed] * users / ms
        # The last requests run beside fewer others.
        assert found == pytest.approx(told, rel=0.03 if users == 1 else 0.12), name


def test_the_page_has_the_published_simulation() -> None:
    """Red where one of both is made anew alone."""
    rows = REPORT.read(PUBLISHED / "load")
    assert summary(rows) in (REPOSITORY / "docs" / "expect.md").read_text()


def test_a_report_calls_every_number_simulated(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("load.run.SEEDS", 1)
    assert main(["--users", "1", "2", "--output-dir", str(tmp_path)]) == 0
    page = (tmp_path / "load.md").read_text()
    heads = [line for line in page.splitlines() if line.endswith(", by users | 1 | 2 |")]
    assert len(heads) == len(TEXTS) * (3 * len(TRACES) + 2)  # two in which users wait
    assert all("| simulated " in line for line in heads)
    columns = (tmp_path / "load.csv").read_text().splitlines()[0].split(",")
    assert sum(column.startswith("simulated_") for column in columns) == 5
    rows = rows_of("head", [1])
    plain = [row for row in rows if row.system == PLAIN]
    assert [row.simulated_to_plain for row in plain] == [1.0] * len(TRACES)
    assert ADAPTIVE.format(8, 16) in {row.system for row in rows}
