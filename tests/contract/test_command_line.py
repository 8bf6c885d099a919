"""The ways to start a server load plugins before they parse arguments."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_launch_server_help() -> None:
    result = run(sys.executable, "-m", "sglang.launch_server", "--help")
    assert "--speculative-smc-num-particles" in result.stdout


def test_serve_refuses_with_the_reason(model_path: str) -> None:
    sglang = Path(sys.executable).with_name("sglang")
    serve = [str(sglang), "serve", model_path, "--model-type", "llm"]
    smc = ["--speculative-algorithm", "SMC", "--speculative-draft-model-path", model_path]
    result = run(*serve, *smc, "--speculative-smc-num-particles", "0")
    assert "--speculative-smc-num-particles is 0; allowed: an integer from 1" in result.stderr
    assert result.returncode != 0
