"""The command on servers that it starts, and on one that runs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_server import running_server
from programs import printed
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

PAIR = Path(__file__).parents[3] / "bench" / "pair"
APPROXIMATE = ("distribution-of-smc", "distribution-of-auto")


def command(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Its results by check. With these seeds none fails; with others one in a thousand runs."""
    file = tmp_path / "found.json"
    printed(sys.executable, "-m", "sglang_smc_tools.testing", *arguments, "--json", file)
    return {found["check"]: found for found in json.loads(file.read_text())["results"]}


@pytest.mark.nightly
def test_servers_of_its_own(tmp_path: Path) -> None:
    """The shipped pair: what is exact passes, and the other modes lie towards the draft."""
    models = ["--target", str(PAIR / "target"), "--draft", str(PAIR / "draft")]
    found = command(tmp_path, *models, "--device", "cpu", "--dtype", "float32", "--scale", "0.5")
    for name in ("equal-models", "draft-distribution", "exact-answers", "distribution-of-exact"):
        assert found[name]["verdict"] == "pass"
    assert found["equal-models"]["estimate"] < 1e-4
    leaning = found["distribution-of-smc"]
    assert leaning["estimate"] > 3 * leaning["standard_error"]


def test_running_server(tmp_path: Path, tiny: Callable[..., str]) -> None:
    """Random models, hot enough for the evidence to be judged. Nobody but the server has q."""
    models = tiny(seed=1, vocab_size=16, scale=0.3), tiny(seed=2, vocab_size=16, scale=0.3)
    given = {"num_particles": 4, "num_steps": 4, "max_total_tokens": 20_000}
    with running_server(tmp_path, **smc_arguments(*models, **given)) as server:
        found = command(tmp_path, "--url", server.url, "--scale", "0.3")
    for name in ("evidence", "draft-distribution", "exact-answers", "distribution-of-exact"):
        assert found[name]["verdict"] == "pass"
    assert found["equal-models"]["verdict"] == "not applicable"
    assert all(found[name]["verdict"] == "measured" for name in APPROXIMATE)
