"""What the plain command serves: who is asked what, when a cell has enough, what is compared."""

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import results
import study
from speed import run as speed
from speed import served, turns
from speed.remote import TimedBatch, Work
from speed.served_report import verdict
from speed.texts import PAIRS, ModelFolders, Question, ServedPair
from speed_stand_ins import ORIGIN, Caller

from sglang_smc.options.request import Budget
from sglang_smc_tools.demo.serving import Launch

TOKENS = 10
#: Seconds of a token, by server.
SECONDS = {"plain": 0.1, "default": 0.05, "fixed": 0.04}


class Server:
    """Answers all requests of a server at one speed, fixed ones of N = 1 at twice the time."""

    def __init__(self, name: str, asked: list[tuple[str, Work]], noise: Iterator[float]) -> None:
        self.name = name
        self.asked = asked
        self.noise = noise

    def internal_state(self) -> dict[str, Any]:
        return {"smc": {"settings": {}}}

    def ask(self, work: Work) -> TimedBatch:
        self.asked.append((self.name, work))
        smc = work.params[0].get("custom_params", {}).get("smc", {})
        slower = (2 if smc.get("num_particles") == 1 else 1) * next(self.noise)
        size = len(work.prompts)
        seconds = SECONDS[self.name] * TOKENS * slower
        info = {"completion_tokens": TOKENS, "spec_verify_ct": 3}
        return TimedBatch([seconds / 9] * size, [seconds] * size, [info] * size)


def questions(_: Path, seed: str, count: int) -> list[Question]:
    return [Question([hash((seed, i))], {"max_new_tokens": 64}) for i in range(count)]


GRID = Budget(1, 4), Budget(4, 8)
PAIR = ServedPair(
    "head", "a head", lambda _: ModelFolders(Path("t"), Path("d")), questions, (1, 4), GRID, 60.0
)


class Bench(Caller):
    """Runs with servers that `Server` stands in for; each answer costs a second."""

    noise: Iterator[float]
    launches: list[Launch]

    @contextlib.contextmanager
    def running(self, launch: Launch, log: Path) -> Iterator[Server]:
        name = log.stem.rpartition("-")[2]
        self.started.append(log.stem)
        self.launches.append(launch)
        yield Server(name, self.asked, self.noise)

    def turns(self) -> list[tuple[str, Work]]:
        """What was asked but for warm-ups."""
        return [(s, w) for s, w in self.asked if w.params[0]["max_new_tokens"] == 64]

    def page(self) -> str:
        return (self.folder / "served" / "served.md").read_text()


def steady() -> Iterator[float]:
    while True:
        yield 1.0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench(speed.main, tmp_path / "out", ("--preset", "served"))
    found.noise = steady()
    found.launches = []
    monkeypatch.setattr(served, "running", found.running)
    monkeypatch.setattr(served, "PAIRS", (PAIR,))
    monkeypatch.setattr(study, "PUBLISHED", tmp_path / "published")
    origin = {**ORIGIN, "load_average": [0.1]}
    for module in (results, served):
        monkeypatch.setattr(module, "provenance", lambda asked: {**origin, "settings": asked})
    return found


def test_the_claim_is_measured_in_turns_on_the_same_prompts(bench: Bench, tmp_path: Path) -> None:
    """Red where one way always goes first, where users wait for each other, or a seed is sent."""
    assert bench("--only", "claim-*", "--publish") == 0
    assert bench.started == ["claim-head-plain", "claim-head-default"]
    ours = bench.turns()[: 2 * turns.LEAST_TURNS]
    assert [server for server, _ in ours] == ["plain", "default", "default", "plain"] * 2
    for (_, one), (_, other) in zip(ours[::2], ours[1::2], strict=True):
        assert one.prompts == other.prompts
    assert ours[0][1].prompts != ours[2][1].prompts
    of_four = bench.turns()[-1][1]
    assert (len(of_four.prompts), of_four.at_once) == (8, 4)
    assert not any("sampling_seed" in one for _, work in bench.asked for one in work.params)
    assert "| a head | 4 | plain decoding | 160.0 | 80.0 | 2.00 [2.00, 2.00] | 4 |" in bench.page()
    folder = tmp_path / "published" / "speed" / "served"
    assert {path.name for path in folder.iterdir()} == set(served.REPORT.files)
    assert bench("--only", "claim-*") == 0 and bench.started == []  # it goes on where it was


def test_the_default_server_is_given_nothing_to_choose(bench: Bench) -> None:
    """Red where a flag of N, K or adapting reaches it, or a fixed one may adapt."""
    assert bench("--only", "grid-*") == 0
    default, fixed = (launch.arguments for launch in bench.launches)
    own = {"speculative_draft_model_path", "speculative_algorithm", "speculative_smc_mode"}
    assert {name for name in default if name.startswith("spec")} == own
    assert fixed.items() - default.items() == {
        ("speculative_smc_num_particles", 4),
        ("speculative_num_steps", 8),
        ("speculative_smc_adaptive", "off"),
    }
    asked = [work.params[0].get("custom_params") for _, work in bench.turns()[:3]]
    each = [{"smc": {"num_particles": n, "num_steps": k}} for n, k in GRID]
    assert asked == [None, *each]
    lines = [line for line in bench.page().splitlines() if line.startswith("| a head | 1 |")]
    best, other = lines  # the best comes first, and is what the default is held to
    assert "| N=4 K=8 |" in best and "0.80 [0.80" in best and best.endswith("**no** |")
    assert "| N=1 K=4 |" in other and "1.60 [1.60" in other and other.endswith("|  |")


def test_a_moving_load_is_beside_the_best_setting_of_each_phase(bench: Bench) -> None:
    assert bench("--only", "moving-*") == 0
    phases = [(len(work.prompts), work.at_once) for _, work in bench.turns()[:3]]
    assert phases == [(answers, users) for users, answers in served.PHASES]
    lines = [line for line in bench.page().splitlines() if line.startswith("| a head |")]
    assert [line.split(" | ")[1:3] for line in lines] == [
        [str(users), "N=4 K=8"] for users, _ in served.PHASES
    ]


def turn_of(default: float, plain: float, took: float = 10.0) -> dict[str, Any]:
    def phase(tokens_a_second: float) -> list[dict[str, Any]]:
        return [
            {"tokens": 100, "seconds": 100 / tokens_a_second, "passes": 30, "lengths": [50] * 2}
        ]

    return {"ways": {"plain": phase(plain), "default": phase(default)}, "took": took}


def test_a_cell_ends_once_its_interval_is_narrow_or_by_time() -> None:
    """Red where a wide interval is published though there is time, or one turn is."""
    quiet = [turn_of(1.0 + 0.01 * (i % 2), 1.0) for i in range(6)]
    noisy = [turn_of(1.0 + 0.3 * (i % 2), 1.0) for i in range(6)]
    assert not turns.is_over(quiet[:1], left=-1.0)
    assert not turns.is_over(quiet[:3], left=100.0) and turns.is_over(quiet[:4], left=100.0)
    assert not turns.is_over(noisy, left=100.0) and turns.is_over(noisy[:2], left=4.0)
    assert not turns.is_over(noisy[:2], left=6.0), "most of a turn fits"
    twice = [turn_of(2.0 + 0.2 * (i % 2), 1.0) for i in range(6)]
    assert turns.is_narrow(twice), "a tenth tells as much of twice the speed"
    found = turns.ratio_to(quiet, "plain", 0)
    assert found.mean == pytest.approx(math.sqrt(1.01)) and found.n == 6
    assert turns.tokens_a_pass(quiet, 0) == pytest.approx(98 / 30)


def test_what_is_open_is_not_called_met() -> None:
    found = turns.ratio_to([turn_of(1.0, 1.0), turn_of(1.1, 1.0)], "plain", 0)
    assert found.low < 0.95 < found.high and verdict(found, 0.95) == "open"
    assert verdict(found, 0.1) == "yes" and verdict(found, 9.0) == "**no**"


def test_what_its_prompts_and_sizes_decide_cannot_be_asked_for(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("--quick",), ("--batch", "1"), ("--repeats", "2")):
        with contextlib.redirect_stderr(io.StringIO()) as told, pytest.raises(SystemExit):
            speed.parse_arguments(["--preset", "served", *words])
        assert "leave out --quick" in told.getvalue()
    assert bench("--list", "--only", "claim-*") == 0
    assert "minutes at most in all" in capsys.readouterr().out


def test_the_claim_takes_half_an_hour() -> None:
    """On two quiet cores, with the starts of its servers."""
    cells = {slug: found for slug, found in served.every_cell().items() if "claim" in slug}
    assert set(cells) == {f"claim-{pair.name}" for pair in PAIRS}
    seconds = [2 * served.START_SECONDS + sum(one.seconds for one in of) for of in cells.values()]
    assert sum(seconds) <= 35 * 60
    assert [one.phases[0][0] for one in cells["claim-head"]] == [1, 4, 8, 16, 32]


def test_prompts_are_real_and_answers_have_lengths_of_their_own() -> None:
    """The shipped pair's and the mixture's; GSM8K is no part of the tree."""
    pairs = {pair.name: pair for pair in PAIRS}
    one, same = (pairs["head"].questions(Path(), "a", 6) for _ in range(2))
    other = pairs["model"].questions(Path(), "b", 6)
    assert one == same and one != other
    assert len({len(found.prompt) for found in one}) > 1
    assert not any("ignore_eos" in found.params for found in one)


def test_a_mixtures_answers_are_as_long_as_real_ones(tmp_path: Path) -> None:
    folder = tmp_path / "mixture" / "target"
    folder.mkdir(parents=True)
    (folder / "texts.json").write_text(json.dumps(list(range(500))))
    pair = next(pair for pair in PAIRS if pair.name == "mixture")
    found = pair.questions(tmp_path, "a", 40)
    assert all(one.prompt == list(range(one.prompt[0], one.prompt[0] + 64)) for one in found)
    lengths = [one.params["max_new_tokens"] for one in found]
    assert len(set(lengths)) > 10 and max(lengths) <= 160
