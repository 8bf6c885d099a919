"""The demo's command line, and how it fails."""

from pathlib import Path

import demo
import pytest
from chat import Answer, Pass
from demo import Contender, contenders, main, parse_arguments, row_of, settings_line

from sglang_smc.options.server import DEFAULTS


def test_no_arguments_are_needed() -> None:
    options = parse_arguments([])
    sizes = (options.num_particles, options.num_steps)
    assert sizes == (DEFAULTS.num_particles, DEFAULTS.num_steps)
    assert options.temperature == 0.7
    assert options.pair == demo.HERE / "pair"


def test_servers_in_order() -> None:
    arguments = ["--pair", "p", "--resample-at", "token"]
    smc, target, auto, exact, draft = contenders(parse_arguments(arguments))
    assert "SMC" in smc.flags and "token" in smc.flags
    assert "auto" in auto.flags and "token" not in auto.flags
    assert "exact" in exact.flags and "token" not in exact.flags
    assert {c.model for c in (smc, target, auto, exact)} == {Path("p/target")}
    assert (draft.model, draft.flags, draft.uses_target) == (Path("p/draft"), (), False)


@pytest.mark.parametrize(
    ("arguments", "slugs"),
    [
        (["--no-auto"], ["smc", "target", "exact", "draft"]),
        (["--no-exact"], ["smc", "target", "auto", "draft"]),
        (["--no-draft", "--no-exact", "--no-auto"], ["smc", "target"]),
    ],
)
def test_servers_can_be_left_out(arguments: list[str], slugs: list[str]) -> None:
    assert [c.slug for c in contenders(parse_arguments(arguments))] == slugs


@pytest.mark.parametrize(("weighs", "ess"), [(True, 0.5), (False, None)])
def test_particles_are_told_of_where_they_are_weighed(weighs: bool, ess: float | None) -> None:
    info = {
        "completion_tokens": 41,
        "spec_verify_ct": 10,
        "spec_smc_num_particles": 8,
        "spec_smc_rounds_ct": 10,
        "spec_smc_resample_ct": 5,
        "spec_smc_ess_mean": 4.0,
    }
    answer = Answer(0, "id", "#### 1", True, "stop", seconds_to_first=0.1, seconds=0.5)
    contender = Contender("SMC", "smc", Path("p/target"), weighs=weighs)
    row = row_of(contender, Pass([answer], 1.0, {"id": info}))
    assert (row.ess_share, row.resample_rate) == (ess, ess)
    assert row.tokens_per_target_pass == 4.0


def test_settings_line_names_what_the_numbers_depend_on() -> None:
    line = settings_line(parse_arguments(["--problems", "9", "--num-steps", "3"]))
    assert "n=9 " in line and "N=8 " in line and "K=3 " in line and "temperature 0.7" in line


@pytest.mark.parametrize("arguments", [["--problems", "0"], ["--resample-at", "never"]])
def test_bad_values_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(arguments)


def test_a_missing_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pair", str(tmp_path), "--output-dir", str(tmp_path / "out")]) == 1
    assert str(tmp_path / "target") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupted)
    assert main([]) == 130
    assert "Interrupted" in capsys.readouterr().err
