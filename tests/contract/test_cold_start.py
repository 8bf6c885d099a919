"""A new process takes server arguments without plugins, loads few modules, and refuses by name."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from contract.test_server_args import GIVEN, OURS
from resolved_args import resolve

pytestmark = pytest.mark.slow

PLUGIN = {
    "sglang_smc",
    "sglang_smc.options",
    "sglang_smc.options.server",
    "sglang_smc.patches",
    "sglang_smc.patches.server_args",
    "sglang_smc.plugin",
    "sglang_smc.server",
    "sglang_smc.server.algorithm",
    "sglang_smc.server.hooks",
    "sglang_smc.upstream",
}
PLATFORM = {
    "sglang_smc.cpu",
    "sglang_smc.dtype",
    "sglang_smc.cpu.platform",
    "sglang_smc.cpu.threads",
}
# Where algorithms are registered; SGLang imports both itself once one is selected.
REGISTRY = {"sglang.srt.speculative.spec_info", "sglang.srt.speculative.spec_registry"}


@pytest.fixture(scope="module")
def answers(model_path: str) -> list[Any]:
    smc = {"speculative_algorithm": "SMC", "speculative_draft_model_path": model_path}
    given = pickle.dumps(resolve(model_path=model_path, random_seed=0, **smc, **GIVEN))
    script = Path(__file__).with_name("cold_start.py")
    command = [sys.executable, "-W", "ignore", str(script), model_path]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in (b"{", b'"')]


def test_arguments_reach_a_process_without_plugins(answers: list[Any]) -> None:
    """Or before it loads them: they are the first that a spawned process unpickles."""
    assert answers[0] == OURS


def test_sglang_serve_loads_plugins_before_it_parses_arguments(answers: list[Any]) -> None:
    assert "--speculative-smc-num-particles is 0; allowed: an integer from 1" in answers[1]


def test_loading_the_plugin_imports_nothing_heavy(answers: list[Any]) -> None:
    found = answers[2]
    assert set(found["ours"]) == PLUGIN | PLATFORM
    assert set(found["others"]) <= REGISTRY
    assert found["with_torch"] == []
