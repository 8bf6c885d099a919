"""A new process loads few modules with the plugin, and `sglang serve` refuses by name."""

import json
import sys
from pathlib import Path

import pytest
from programs import printed

from sglang_smc.upstream import IS_NEWER

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
# Where algorithms are registered, refused beside adapters, and looked for in a draft's checkpoint;
# SGLang imports them itself once one is selected.
REGISTRY = {"sglang.srt.speculative.spec_info", "sglang.srt.speculative.spec_registry"}
if IS_NEWER:
    REGISTRY |= {"sglang.srt.arg_groups.lora_hook", "sglang.srt.arg_groups.speculative_hook"}


def test_a_cold_process_loads_plugins_before_flags_and_nothing_heavy(model_path: str) -> None:
    script = Path(__file__).with_name("cold_start.py")
    told = printed(sys.executable, "-W", "ignore", script, model_path)
    refused, mode, found = [
        json.loads(line) for line in told.splitlines() if line[:1] in ("{", '"')
    ]
    assert "--speculative-smc-num-particles is 0; allowed: an integer from 1" in refused
    assert mode == "exact"
    assert set(found["ours"]) == PLUGIN | PLATFORM
    assert set(found["others"]) <= REGISTRY
    assert found["with_torch"] == []
