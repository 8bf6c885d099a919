"""Where SMC is not selected, loading the plugin imports a few small modules, and no more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("load_cost.py")

PLUGIN = {
    "sglang_smc",
    "sglang_smc.options",
    "sglang_smc.options.server",
    "sglang_smc.patches",
    "sglang_smc.patches.server_args",
    "sglang_smc.plugin",
    "sglang_smc.server",
    "sglang_smc.server.algorithm",
    "sglang_smc.server.compat",
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


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    command = [sys.executable, str(SCRIPT)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert set(found["ours"]) == PLUGIN | PLATFORM
    assert set(found["others"]) <= REGISTRY
    assert found["with_torch"] == []
