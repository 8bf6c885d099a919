"""Test that a server that cannot run says why, in one message."""

import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_a_draft_with_another_vocabulary_is_refused(tiny: Callable[..., str]) -> None:
    """Settings are refused earlier, by tests/contract/test_server_args.py."""
    target = tiny(vocab_size=64, seed=1)
    draft = tiny(vocab_size=32, seed=2)
    command = (
        f"{sys.executable} -m sglang.launch_server --model-path {target} "
        f"--speculative-algorithm SMC --speculative-draft-model-path {draft} "
        "--context-length 128 --max-total-tokens 4096 --speculative-smc-max-lag 16"
    )
    ended = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    assert "32 tokens differ: 't32' is 32 in the target and None in the draft" in output
    assert "Choose a draft of the target's family." in output
