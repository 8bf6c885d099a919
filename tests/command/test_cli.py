"""``sglang-smc``: which words it knows, how it ends, and that its help does not wait."""

import signal
import sys

import pytest
from programs import printed

from sglang_smc import __version__
from sglang_smc.command import cli
from sglang_smc_tools.commands import interruptible, main_of

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


def test_help_and_a_plan_wait_for_nothing_heavy() -> None:
    asked = ["--help", "doctor --help", "plan --help", "watch --help", PLAN]
    program = (
        "import sys\nfrom sglang_smc.command.cli import main\n"
        f"for words in {[line.split() for line in asked]}:\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    told = printed(sys.executable, "-c", program)
    assert "Best: SMC" in told and told.splitlines()[-1] == "[]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_ctrl_c_does(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Red where servers would outlive their command; the handler before is in force again."""
    outside = signal.signal(number, signal.SIG_DFL)  # ignored under nohup

    def run() -> None:
        with interruptible():
            signal.raise_signal(number)
            pytest.fail("the signal interrupted nothing")

    assert main_of(run, "All has ended.") == 130
    assert "Interrupted. All has ended." in capsys.readouterr().err
    assert signal.signal(number, outside) is signal.SIG_DFL
