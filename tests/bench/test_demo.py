"""The demo's command line, and how it fails."""

from pathlib import Path

import demo
import pytest
from demo import contenders, main, parse_arguments, settings_line


def test_no_arguments_are_needed() -> None:
    options = parse_arguments([])
    assert (options.num_particles, options.temperature) == (8, 0.7)
    assert options.pair == demo.HERE / "pair"


def test_servers_in_order() -> None:
    arguments = ["--pair", "p", "--resample-at", "token"]
    smc, target, exact, draft = contenders(parse_arguments(arguments))
    assert "SMC" in smc.flags and "token" in smc.flags
    assert "exact" in exact.flags and "token" not in exact.flags
    assert smc.model == target.model == Path("p/target")
    assert (draft.model, draft.flags, draft.uses_target) == (Path("p/draft"), (), False)
    assert [c.slug for c in contenders(parse_arguments(["--no-draft", "--no-exact"]))] == [
        "smc",
        "target",
    ]


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
