"""The simulator of rounds on recorded answers: laws of chance, and what ways to choose do."""

from pathlib import Path

import numpy as np
import pytest
from steps import run as frame
from steps.rounds import (
    TOP,
    FixedSteps,
    KnownRounds,
    RecordedAnswer,
    RunningRequest,
    StepsByRequest,
    Stopping,
    expected_tokens,
    play,
    tokens_a_round,
)
from steps.run import POLICY, WAYS, guess_of, main, repeated

from sglang_smc.options.policy import fewer_rejections
from sglang_smc.options.request import Budget


def seconds(users: int, budget: Budget) -> float:
    """A target pass of 5 ms, and 1 ms for each of the draft."""
    return 5.0 + budget.num_steps


def answer(accepted: list[float], sure: list[float] | None = None) -> RecordedAnswer:
    behind = {0: np.zeros(12)}
    return RecordedAnswer(np.array(accepted), np.array(sure or accepted), behind, len(accepted))


@pytest.mark.parametrize("budget", [Budget(1, 4), Budget(4, 8)])
def test_rounds_keep_what_their_chances_say(budget: Budget) -> None:
    """Of equal chances the sum of a geometric series; of any, the mean of what is played."""
    kept = 1.0 - 0.3 * fewer_rejections(budget.num_particles)
    even = tokens_a_round(np.full(4000, 0.7), budget)
    assert even == pytest.approx(expected_tokens(kept, budget.num_steps), rel=0.01)
    some = answer(np.random.default_rng(0).random(40).tolist())
    spent, tokens = play(FixedSteps(budget), seconds, [some], 1, times=2000, seed=0)
    found = tokens[0] / (spent[0] / seconds(1, budget))
    assert found == pytest.approx(tokens_a_round(some.accepted, budget), rel=0.015)


@pytest.mark.parametrize("users", [1, 3])
def test_all_tokens_are_written_in_the_time_of_all_rounds(users: int) -> None:
    """Rejected always: a token a round of each request; accepted always: K + 1."""
    for chance, rounds in ((0.0, 12), (1.0, 4)):
        way = FixedSteps(Budget(1, 2))
        spent, tokens = play(way, seconds, [answer([chance] * 12)] * 3, users, times=1, seed=0)
        assert tokens.tolist() == [12] * 3
        assert spent.sum() == pytest.approx(3 * rounds * 7.0 / users)


def test_a_request_turns_to_a_small_k_within_four_rounds_and_back() -> None:
    """Back more slowly: a round of few tokens tells little."""
    way = StepsByRequest(TOP, seconds, decay=0.7)
    request = RunningRequest(0, answer([0.5] * 400), np.zeros(400))

    def after(rounds: int, share: int) -> int:
        for _ in range(rounds):
            budget = way.choose([request])
            way.learn([request], budget, [share * budget.num_steps])
        return way.choose([request]).num_steps  # chosen two rounds late

    assert after(4, 0) <= 4
    assert after(14, 1) == TOP.num_steps


def test_a_round_stops_before_the_token_that_will_be_lost() -> None:
    """Where the guesses are certain it drafts that token alone beyond those that are kept."""
    accepted = [1.0, 1.0, 1.0, 0.0] * 10
    one = answer(accepted)
    way = Stopping(Budget(1, 16), seconds)
    known = KnownRounds(Budget(1, 16), seconds)
    request = RunningRequest(0, one, np.full(40, 0.5))
    assert request.sure(1, 16).tolist() == [1.0] * 3 + [0.0] * 13
    for chooser, steps in ((way, 4), (known, 3)):
        chooser.learn([request], Budget(1, 16), [3])
        assert chooser.choose([request]) == Budget(1, steps)


def test_a_stop_that_waits_counts_its_waits() -> None:
    """A round of one token yields 2 in 6 ms: a third of a token a ms, and a pass takes 3.1."""
    request = RunningRequest(0, answer([1.0] * 40), np.full(40, 0.5))
    for wait, steps in ((0.0, 16), (2.1, 1)):
        way = Stopping(Budget(1, 16), seconds, wait=wait)
        way.learn([request], Budget(1, 1), [1])
        assert way.choose([request]) == Budget(1, steps)
    way = Stopping(Budget(1, 3), seconds, wait=1.0)
    spent, _ = play(way, seconds, [answer([1.0] * 12)], 1, times=1, seed=0)
    assert spent.sum() == 3 * (8.0 + 2 * 1.0)


def test_guesses_follow_what_was_accepted() -> None:
    entropy = np.linspace(0.0, 3.0, 240)
    guess = guess_of(entropy, (entropy < 1.5).astype(float))
    assert guess([0.0, 1.0, 2.0, 9.0]).tolist() == [1.0, 1.0, 0.0, 0.0]
    twice = repeated(answer([0.1, 0.2]), 2)
    assert (twice.accepted.tolist(), twice.length) == ([0.1, 0.2] * 2, 2)


def test_a_report_calls_every_number_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "SEEDS", 1)
    monkeypatch.setattr(frame, "TIMES", 1)
    monkeypatch.setattr(frame, "LENGTHS", {"at most 96 tokens": 1})
    assert main(["--output-dir", str(tmp_path)]) == 0
    rows = frame.REPORT.read(tmp_path)
    ratios = {(row.way, row.users): row.simulated_to_policy.mean for row in rows}
    assert {way for way, _ in ratios} == set(WAYS)
    assert all(ratios[POLICY, users] == 1.0 for users in (1, 2, 4))
    assert ratios["bound: each round known", 1] == min(
        of for (_, n), of in ratios.items() if n == 1
    )
    assert "**All figures are simulated.**" in (tmp_path / "steps.md").read_text()
