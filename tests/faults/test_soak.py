"""Three minutes of a crowd, and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from soak.verdict import LEAST_FULL

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

SOAK = Path(__file__).parents[2] / "bench" / "soak"
NUM_VERIFIED = 60
PROCESSES = {"launch_server", "scheduler", "detokenizer"}


def test_three_minutes(tmp_path: Path) -> None:
    """Red for a leak, a lost or wrong answer, memory that grows, and a pool that is not full."""
    command = [sys.executable, str(SOAK), "--minutes", "3", "--verify", str(NUM_VERIFIED)]
    run = subprocess.run(
        [*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    said = run.stdout + run.stderr[-3000:]
    assert run.returncode == 0, said
    verdict = json.loads((tmp_path / "soak.json").read_text())["verdict"]
    assert verdict["problems"] == []
    assert verdict["requests"] > 100, said
    assert 0.2 < verdict["left"] / verdict["requests"] < 0.45, said
    assert verdict["retracted"] > 0
    assert verdict["full_share"] >= LEAST_FULL
    assert verdict["verified"] == NUM_VERIFIED
    assert {name.split()[0] for name in verdict["growth"]} >= PROCESSES
