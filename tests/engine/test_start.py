"""Servers that cannot run say why, in one message, before or while they start."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import ENGINE_DEFAULTS, smc_arguments

pytestmark = pytest.mark.engine


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(vocab_size=64, seed=1), tiny(vocab_size=64, seed=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_total_tokens": 100}, ["100", "--max-total-tokens", "--speculative-smc-max-lag"]),
        ({"num_particles": 0}, ["--speculative-smc-num-particles", "0"]),
        ({"ess_threshold": 1.5}, ["--speculative-smc-ess-threshold", "1.5"]),
        ({"num_steps": 0}, ["--speculative-num-steps", "0"]),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    pair: tuple[str, str], settings: dict[str, Any], words: list[str]
) -> None:
    import sglang

    arguments = {**ENGINE_DEFAULTS, **smc_arguments(*pair, **settings)}
    with pytest.raises(ValueError, match="SMC") as refusal:
        sglang.Engine(**arguments)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.slow
def test_a_draft_with_another_vocabulary_is_refused(tiny: Callable[..., str]) -> None:
    target, draft = tiny(vocab_size=64, seed=1), tiny(vocab_size=32, seed=2)
    command = (
        f"{sys.executable} -m sglang.launch_server --model-path {target} "
        f"--speculative-algorithm SMC --speculative-draft-model-path {draft} "
        "--context-length 128 --max-total-tokens 4096 --speculative-smc-max-lag 16"
    )
    ended = subprocess.run(command.split(), capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    assert "32 tokens differ: 't32' is 32 in the target and None in the draft" in output
    assert "Choose a draft of the target's family." in output
