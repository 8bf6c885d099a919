"""What all tables are made of, that pages say what was published, and what was tried."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chains.run import ChainStudy
from drafts.run import DraftStudy
from fidelity.run import Fidelity
from figures import figures_of
from intervals import wilson
from real.run import Real
from results import over_rounds, tokens_a_pass
from scipy.stats import binomtest
from speed.remote import EngineError
from steering.run import Steering, shown, summaries
from study import PUBLISHED, REPOSITORY
from support import features, run
from support.families import FAMILIES
from support.run import Trial


def smc_info(rounds: int, resampled: int, ess: float) -> dict[str, Any]:
    of_rounds = {"spec_smc_rounds_ct": rounds, "spec_smc_resample_ct": resampled}
    return {**of_rounds, "spec_smc_num_particles": 8, "spec_smc_ess_mean": ess}


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (1, 10), (55, 100), (300, 300)])
def test_wilson_interval_is_scipys(hits: int, n: int) -> None:
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    found = wilson(hits, n)
    assert found == pytest.approx((hits / n, expected.low, expected.high, n), abs=1e-7)


def test_rates_are_weighted_by_rounds_and_plain_decoding_makes_one_token_a_pass() -> None:
    infos = [smc_info(rounds=30, resampled=3, ess=8.0), smc_info(rounds=10, resampled=7, ess=4.0)]
    assert over_rounds(infos, "spec_smc_ess_mean", "spec_smc_num_particles") == pytest.approx(
        (30 * 1.0 + 10 * 0.5) / 40
    )
    assert over_rounds(infos, "spec_smc_resample_ct", "spec_smc_rounds_ct") == 10 / 40
    assert tokens_a_pass([{"completion_tokens": 7}, {"completion_tokens": 31}]).mean == 1.0


@pytest.mark.parametrize(
    "study", [ChainStudy, DraftStudy, Fidelity, Real, Steering], ids=lambda study: study.name
)
def test_a_published_table_is_made_of_the_published_numbers(study: Any) -> None:
    """Behind a note, which says how they were measured then."""
    report = study.report
    folder = PUBLISHED / study.name
    parts = (folder / f"{study.name}.md").read_text().split("\n\n")[1:]
    there = "\n\n".join(one for one in parts if "by its evidence" not in one)  # in no column yet
    assert there == report.markdown(report.read(folder), "").removeprefix("\n\n")
    assert study.note(json.loads((folder / "provenance.json").read_text()))


def test_pages_say_what_was_published() -> None:
    """Red where results are replaced and the page is not, or the other way round."""
    pages = {path.stem: path.read_text() for path in (REPOSITORY / "docs").glob("*.md")}
    steered = Steering.report.read(PUBLISHED / "steering")
    assert summaries(shown(steered)) in pages["potentials"]
    assert run.tables(run.read(PUBLISHED / "support" / "support.json")) in pages["families"]
    found = json.loads((PUBLISHED / "support" / "features.json").read_text())["features"]
    assert features.items(found) in pages["support"]
    peer = json.loads((PUBLISHED / "steering" / "genlm_control.json").read_text())["rows"]
    for system in ("genlm-control", "sglang-smc"):
        mean, low, high, _ = peer[system]["tokens a second"]
        assert f"{mean:.0f} [{low:.0f}, {high:.0f}]" in " ".join(pages["potentials"].split())
        assert f" {peer[system]['Z-hat'][0]:.2f}" in pages["potentials"]
    published = [(PUBLISHED / name / f"{name}.md").read_text() for name in ("real", "trees")]
    published.append(
        (PUBLISHED / "drafts" / "drafts.md").read_text().partition("**Temperature 1")[0]
    )
    known = [figures_of(line) for table in published for line in table.splitlines()]
    for heading in ("How many tokens does each keep?", "Beside SGLang's trees"):
        section = pages["drafts"].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        cited = [figures_of(line) for line in section.splitlines() if line.startswith("| ")]
        assert len(cited) > 5 and all(any(row <= line for line in known) for row in cited)


def test_every_family_was_tried_and_none_fails() -> None:
    found = run.read(PUBLISHED / "support" / "support.json")
    assert set(found) == {family.name for family in FAMILIES} and len(FAMILIES) >= 40
    assert [one for one in found.values() if "failed" in (one.target, one.draft)] == []


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ([None], ("run", "run", "")),
        (
            ["--speculative-draft-model-path /y has no KV; no\n  - --model-path /x has states; no"],
            ("refused", "refused", "states"),
        ),
        (
            ["--speculative-draft-model-path /x has no KV, which", None],
            ("run", "refused", "as a draft: no KV"),
        ),
        (["KeyError: 'x'", None], ("failed", "failed", "KeyError: 'x'")),
        (["KeyError: 'x'", "no such class"], ("not here", "not here", "no such class")),
    ],
)
def test_what_becomes_of_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[str | None], told: tuple
) -> None:
    """Engines answer, or end with an error in their log."""
    left = iter(outcomes)

    class Answering:
        def generate(self, input_ids: list[Any], **_: Any) -> list[Any]:
            return [{"output_ids": [7], "meta_info": {"spec_accept_rate": 1}}] * len(input_ids)

    @contextlib.contextmanager
    def running(launch: Any, log: Path) -> Iterator[Answering]:
        if error := next(left):
            log.write_text(f"ValueError: it cannot start\n  - {error}")
            raise EngineError(error)
        yield Answering()

    monkeypatch.setattr(run, "running", running)
    monkeypatch.setattr(run, "save", lambda family, folder: str(folder))
    monkeypatch.setattr(run, "_transformers", lambda *_: [[7]] * len(run.prompts()))
    assert run.try_family(FAMILIES[0], tmp_path) == (FAMILIES[0].name, *told)
    assert next(left, "") == ""


def test_only_a_row_that_was_tried_is_shown(tmp_path: Path) -> None:
    names = [FAMILIES[1].name, FAMILIES[0].name]
    run.write(tmp_path / "trials.json", {name: Trial(name, "run", "run") for name in names})
    found = run.read(tmp_path / "trials.json")
    assert list(found) == names[::-1], "in the families' order"
    told = f"- **Target yes, draft yes**: {FAMILIES[0].name}; {FAMILIES[1].name}"
    assert told in run.tables(found)
    assert FAMILIES[2].name not in run.tables(found)
