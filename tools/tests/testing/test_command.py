"""The command: exit codes, table, JSON, and errors that say what to do. Toys answer."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little_server import answering

from sglang_smc_tools.commands import prompts_in
from sglang_smc_tools.testing import Model, cli, connect, report
from sglang_smc_tools.testing.model import SMCPair
from sglang_smc_tools.testing.report import Result, Verdict

MakeModel = Callable[..., Model]
AnsweredBy = Callable[[SMCPair], None]
Capture = pytest.CaptureFixture[str]
FEW = ["--url", "http://toy", "--scale", "0.5"]


@pytest.fixture
def answered_by(monkeypatch: pytest.MonkeyPatch) -> AnsweredBy:
    """Puts toys in the server's place."""

    def put(pair: SMCPair) -> None:
        monkeypatch.setattr(cli, "_models", lambda arguments: contextlib.nullcontext(pair))

    return put


def test_right_models_give_zero_and_all_numbers(
    answered_by: AnsweredBy, model: MakeModel, draft: Model, tmp_path: Path, capsys: Capture
) -> None:
    answered_by(SMCPair(model(), draft))
    assert cli.main([*FEW, "--json", str(tmp_path / "found.json")]) == 0
    written = json.loads((tmp_path / "found.json").read_text())
    verdicts = {result["check"]: result["verdict"] for result in written["results"]}
    assert list(verdicts) == list(cli.NAMES)
    assert verdicts.pop("equal-models") == "not applicable"
    passed = {name for name, verdict in verdicts.items() if verdict == "pass"}
    assert passed == {*cli.CHECKS, "distribution-of-exact"} - {"equal-models"}
    assert written["false_alarm"] == pytest.approx(1e-3)
    assert "at most 0.001" in capsys.readouterr().out


def test_a_wrong_sampler_gives_one_and_says_which_check(
    answered_by: AnsweredBy, model: MakeModel, tables: tuple, capsys: Capture
) -> None:
    answered_by(SMCPair(model(drawn=tables[1])))
    assert cli.main([*FEW, "--only", "exact-answers,draft-distribution"]) == 1
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if "FAIL" in line]
    assert row.startswith("exact-answers")
    assert "1 pass, 1 fail" in shown


def test_what_was_not_judged_raises_no_alarm() -> None:
    skipped = Result("a", "b", Verdict.NOT_APPLICABLE, "c", alpha=0.5)
    assert report.false_alarm([skipped]) == 0.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *(
            (words.split(), "both --target and --draft")
            for words in ("", "--target t", "--url http://a --draft d", "--draft-url http://a")
        ),
        (["--target", "./none", "--draft", "./none"], "--target ./none: no config.json"),
    ],
)
def test_half_a_pair_or_no_model_is_told(arguments: list[str], told: str, capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    assert told in capsys.readouterr().err


PLAIN = {"model_path": "m", "speculative_algorithm": None, "internal_states": [{}]}


@pytest.mark.parametrize(
    ("status", "body", "needle"),
    [
        (200, PLAIN, "--speculative-algorithm None; needed: SMC"),
        (200, {"hello": "world"}, "not as an SGLang server"),
        (404, {}, "not as an SGLang server"),
        (401, {}, "--api-key"),
        (None, {}, "no server answers there"),
    ],
)
def test_other_servers_are_refused(status: int | None, body: Any, needle: str) -> None:
    with (
        answering(lambda *_: (status or 200, body)) as url,
        pytest.raises(ValueError, match=needle),
    ):
        connect("http://127.0.0.1:9" if status is None else url)


def test_a_plain_server_may_be_the_draft_s_and_stops_answering_without_a_traceback() -> None:
    """It closes the connection at each POST."""
    with answering(lambda *_: (200, {**PLAIN, "speculative_draft_model_path": None})) as url:
        found = connect(url, needs_smc=False)
        assert found.settings == {}
        with pytest.raises(ValueError, match="stopped answering"):
            found.token_ids("a")


def test_prompts_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One line.\n\n  Another. \n")
    assert prompts_in(file) == ["One line.", "Another."]
    file.write_text("\n")
    with pytest.raises(ValueError, match="one a line"):
        prompts_in(file)
    with pytest.raises(ValueError, match="Give a text file"):
        prompts_in(tmp_path / "missing")
