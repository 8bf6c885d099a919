"""Checks of conformance: right tokens pass, and each mistake that a server may make is found."""

import argparse
import json
import math
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import study
from conformance import run
from conformance.checks import sampling
from conformance.checks.registry import CHECKS, FeatureCheck
from conformance.laws import Asked, ScoredPlace, check_law
from conformance.server import AbsentError, WrongError

from sglang_smc_tools.testing.client import RefusedError

SIZE = 12
ANSWERS = 80
LENGTH = 8


def logprobs_behind(before: tuple[Any, ...]) -> dict[Any, float]:
    """A model's distribution, by the last token."""
    draw = random.Random(before[-1] if before else SIZE)
    scores = {token: draw.gauss(0.0, 1.5) for token in range(SIZE)}
    top = Asked().law(ScoredPlace(0, (), (), scores))
    return {token: math.log(mass) for token, mass in top.items()}


def answered(asked: Asked, seed: int, *, is_late: bool = False) -> list[ScoredPlace]:
    """The places of answers that follow a request; or what it asks for without the last token."""
    draw = random.Random(seed)
    found: list[ScoredPlace] = []
    for _ in range(ANSWERS):
        before: tuple[Any, ...] = ()
        for _ in range(LENGTH):
            told = logprobs_behind(before)
            known = before[:-1] if is_late else before
            law = asked.law(ScoredPlace(0, (), known, told))
            token = draw.choices(list(law), list(law.values()))[0]
            found.append(ScoredPlace(token, (), before, told))
            before += (token,)
    return found


ASKED = {name: one.asked for name, one in sampling.SETTINGS.items()}
ASKED["biases"] = Asked(edit=partial(sampling._biased, {"1": 2.0, "3": -2.0}))
ASKED["no pair twice"] = Asked(edit=sampling._no_pair_twice)


@pytest.mark.parametrize("name", ASKED)
def test_a_setting_that_is_followed_passes_and_one_that_is_ignored_does_not(name: str) -> None:
    asked = ASKED[name]
    check_law(answered(asked, 1), asked, is_exact=True)
    check_law(answered(asked, 2), asked, is_exact=False)
    with pytest.raises(WrongError):
        check_law(answered(Asked(), 3), asked, is_exact=True)
    with pytest.raises(WrongError):
        check_law(answered(Asked(), 4), asked, is_exact=False)


@pytest.mark.parametrize("name", ["frequency penalty", "no pair twice"])
def test_what_comes_one_token_late_is_wrong(name: str) -> None:
    with pytest.raises(WrongError):
        check_law(answered(ASKED[name], 5, is_late=True), ASKED[name], is_exact=True)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (WrongError("x"), "wrong"),
        (AbsentError("x"), "absent"),
        (RefusedError("HTTP 400"), "refused"),
        (ValueError("HTTP 404"), "absent"),
        (ValueError("HTTP 500"), "wrong"),
        (KeyError("choices"), "wrong"),
    ],
)
def test_verdicts(error: Exception, verdict: str) -> None:
    def fails(server: Any) -> str:
        raise error

    assert run.judge(FeatureCheck("a feature", "group", fails), None).verdict == verdict  # type: ignore[arg-type]


def test_there_are_thirty_features_and_each_has_one_check() -> None:
    assert len({one.feature for one in CHECKS}) == len(CHECKS) >= 30
    assert {one.variant for one in CHECKS} == set(run.VARIANTS)


def test_a_run_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a check runs twice, or a table forgets what another call found."""
    monkeypatch.setattr(run, "is_alive", lambda server: True)
    asked: list[str] = []
    checks = [
        FeatureCheck(name, "group", partial(lambda name, _: asked.append(name) or "", name))
        for name in ("first", "second")
    ]
    options = argparse.Namespace(output_dir=tmp_path, features=["*"], fresh=False, publish=False)
    for some in (checks[:1], checks):
        this = run.ConformanceStudy(options)
        this.checks = some
        this.run("a-server", run.BASE, None)  # type: ignore[arg-type]
    assert asked == ["first", "second"]
    asked.clear()
    monkeypatch.setattr(run, "is_alive", lambda server: False)
    with pytest.raises(run.ServerEndedError):
        this.run("ended", run.BASE, None)  # type: ignore[arg-type]
    assert this.verdicts("ended")["first"].told.startswith("the server ends")
    assert [one.feature for one in this.left("ended", run.BASE)] == ["second"]
    this.refuse("other", run.BASE, "no head")
    this.start_anew("ended")
    assert this.left("ended", run.BASE) == checks
    columns = {name: this.verdicts(name) for name in ("a-server", "other")}
    table = run.table_of(columns, checks).splitlines()
    assert table[2:] == ["| first | ✓ | refused |", "| second | ✓ | refused |"]
    assert "other, first: refused: at start: no head" in run.reasons_of(columns)
    assert json.loads((tmp_path / "other-base.jsonl").read_text().splitlines()[1])


def test_the_page_counts_and_shows_what_was_found() -> None:
    """Red where the last published run has other verdicts than docs/coming-from-sglang.md."""
    folder = study.PUBLISHED / "conformance"
    page = run.PAGE.read_text()
    for engine in run.ENGINES:
        if not engine.name.startswith("SMC "):
            continue
        found: Counter[str] = Counter()
        for variant in run.VARIANTS:
            slug = study.slug_of(f"{engine.slug} {variant}")
            entries = study.whole_lines(folder / f"{slug}.jsonl")
            found.update(entry["verdict"] for entry in entries[1:])
        assert found == {"ok": 45, "refused": 2}, engine.name
    assert "Of 47 features SMC has 45 in every mode, and refuses two" in page
    table, *_ = (folder / "conformance.md").read_text().split("\n\n")
    shown = run.differing(table)
    assert shown in page and "| seeds |" in shown and "| temperature |" not in shown
