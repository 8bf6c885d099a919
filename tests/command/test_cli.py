"""``sglang-smc``: which words it knows, how it ends, and that its help does not wait."""

import sys

import pytest
from programs import printed

from sglang_smc import __version__
from sglang_smc.command import cli, extensions

HEAVY = ("torch", "sglang", "transformers", "openai", "matplotlib", "numpy")
PLAN = "plan --target llama-3.1-8b --draft llama-3.2-1b --device h200"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out
    for words, says in (([], "no command"), (["serve"], "'serve'")):
        assert cli.main(words) == 2
        shown = capsys.readouterr()
        assert says in shown.err and "doctor" in shown.err and shown.out == ""


def test_a_command_gets_the_words_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cli.COMMANDS:
        given: list[list[str]] = []
        monkeypatch.setattr(
            cli.module_of(name), "main", lambda argv, given=given: given.append(argv) or 7
        )
        assert cli.main([name, "--x", "1"]) == 7
        assert given == [["--x", "1"]]


def test_without_its_tools_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda group: ())
    for name in set(cli.COMMANDS) - {cli.DOCTOR, cli.COMPILE}:
        assert cli.main([name, "--help"]) == 2
        told = capsys.readouterr()
        assert f"{name} is a command of sglang-smc-tools" in told.err and told.out == ""
        assert extensions.INSTALL in told.err
    assert cli.main(["doctor", "--target", "llama-3.1-8b"]) == 2
    assert extensions.INSTALL in capsys.readouterr().err


def test_help_and_a_plan_wait_for_nothing_heavy() -> None:
    asked = ["--help", "doctor --help", "compile --help", "plan --help", "watch --help", PLAN]
    program = (
        "import sys\nfrom sglang_smc.command.cli import main\n"
        f"for words in {[line.split() for line in asked]}:\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    told = printed(sys.executable, "-c", program)
    assert "Best: SMC" in told and told.splitlines()[-1] == "[]"
