"""The trials of families of models: what they are, and what is read of them."""

import json
from pathlib import Path

from study import PUBLISHED
from support import cli, page, pairs, trial
from support.families import FAMILIES
from support.trial import Trial


def test_every_family_was_tried_and_none_fails() -> None:
    found = cli.read(PUBLISHED / "support" / "support.json")
    assert set(found) == {family.name for family in FAMILIES} and len(FAMILIES) >= 40
    assert [one for one in found.values() if "failed" in (one.target, one.draft)] == []


def test_a_refusal_is_read_by_its_flag_and_a_death_by_its_last_error(tmp_path: Path) -> None:
    message = (
        "--speculative-algorithm SMC cannot start this server:\n"
        "  - --model-path /x has a recurrent state; allowed: others. Choose one.\n"
        "  - --speculative-draft-model-path /y has sparse attention; allowed: others."
    )
    assert trial._reasons(message) == {
        "--model-path": "a recurrent state",
        "--speculative-draft-model-path": "sparse attention",
    }
    log = tmp_path / "log"
    log.write_text("starting\nValueError: first\n  in a trace: Error\nKeyError: 'last'\nbye\n")
    assert cli._last_error(log) == "KeyError: 'last'"
    assert cli._last_error(tmp_path / "none") == "it did not answer"


def test_only_a_row_that_was_tried_is_shown(tmp_path: Path) -> None:
    names = [FAMILIES[1].name, FAMILIES[0].name]
    cli.write(tmp_path / "trials.json", {name: Trial(name, "run", "run") for name in names})
    found = cli.read(tmp_path / "trials.json")
    assert list(found) == names[::-1], "in the families' order"
    assert f"| {FAMILIES[2].name} |" not in page.tables(found)


def test_a_bare_configuration_names_its_architecture(tmp_path: Path) -> None:
    for number, family in enumerate(one for one in FAMILIES if one.architecture is not None):
        folder = tmp_path / str(number)
        config = json.loads(Path(trial.save(family, folder), "config.json").read_text())
        assert config["architectures"] == [family.architecture]
        assert (folder / "tokenizer.json").exists()


def test_requests_that_fit_a_gpu() -> None:
    """16.1 and 2.5 GB of weights, 160 KiB a token, 1,536 tokens and 81 slots a request."""
    room = 0.88 * 80e9 - 1.5e9 - 18.6e9
    assert pairs.fit(pairs.PAIRS[0], 80e9, 81) == int(room / (160 * 1024) / (1536 + 81))
    assert pairs.fit(pairs.PAIRS[0], 20e9, 81) is None
