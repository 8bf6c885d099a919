"""The trials of families of models: what they are, what is read of them, and what a page says."""

import json
from pathlib import Path

import pytest
from support import cli, page, pairs, trial
from support.families import FAMILIES, Family
from support.trial import Trial

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "support" / "support.json"


def test_the_page_says_what_was_found() -> None:
    found = cli.read(RESULTS)
    text = (ROOT / "docs" / "support.md").read_text()
    made = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert made.strip() == page.tables(found).strip()


def test_every_family_was_tried() -> None:
    assert set(cli.read(RESULTS)) == {family.name for family in FAMILIES}


def test_nothing_fails() -> None:
    found = cli.read(RESULTS).values()
    assert [one for one in found if "failed" in (one.target, one.draft)] == []


def test_names_tell_families_apart() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 40


def test_a_refusal_is_read_by_its_flag() -> None:
    message = (
        "--speculative-algorithm SMC cannot start this server:\n"
        "  - --model-path /x has a recurrent state; allowed: others. Choose one.\n"
        "  - --speculative-draft-model-path /y has sparse attention; allowed: others."
    )
    assert trial._reasons(message) == {
        "--model-path": "a recurrent state",
        "--speculative-draft-model-path": "sparse attention",
    }


def test_a_process_that_dies_tells_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\nValueError: first\n  in a trace: Error\nKeyError: 'last'\nbye\n")
    assert cli._last_error(log) == "KeyError: 'last'"
    assert cli._last_error(tmp_path / "none") == "it did not answer"


def test_trials_are_kept_in_the_families_order(tmp_path: Path) -> None:
    names = [FAMILIES[1].name, FAMILIES[0].name]
    found = {name: Trial(name, "run", "run") for name in names}
    cli.write(tmp_path / "trials.json", found)
    assert list(cli.read(tmp_path / "trials.json")) == names[::-1]


def test_a_table_has_a_row_for_each_family() -> None:
    found = {family.name: Trial(family.name, "run", "refused", "why") for family in FAMILIES}
    rows = [line for line in page.tables(found).splitlines() if line.endswith("| why |")]
    assert len(rows) == len(FAMILIES)
    assert rows[0] == f"| {FAMILIES[0].name} | yes | refused | why |"


def test_only_a_row_that_was_tried_is_shown() -> None:
    one = FAMILIES[0].name
    assert FAMILIES[1].name not in page.tables({one: Trial(one, "run", "run")})


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.architecture is not None])
def test_a_bare_configuration_names_its_architecture(family: Family, tmp_path: Path) -> None:
    config = json.loads(Path(trial.save(family, tmp_path), "config.json").read_text())
    assert config["architectures"] == [family.architecture]
    assert (tmp_path / "tokenizer.json").exists()


def test_requests_that_fit_a_gpu() -> None:
    """16.1 and 2.5 GB of weights, 160 KiB a token, 1,536 tokens and 81 slots a request."""
    llama = pairs.PAIRS[0]
    room = 0.88 * 80e9 - 1.5e9 - 18.6e9
    assert pairs.fit(llama, 80e9, 81) == int(room / (160 * 1024) / (1536 + 81))
    assert pairs.fit(llama, 20e9, 81) is None
