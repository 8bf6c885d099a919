"""Commands that start servers end on a signal as on Ctrl-C."""

import signal

import pytest

from sglang_smc.command.program import main_of
from sglang_smc_tools.commands import interruptible


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
