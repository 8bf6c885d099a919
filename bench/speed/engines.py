"""Define the keywords and the environment of each system's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.grid import AR_STOCK, BLOCK, CHAIN, MODES, NGRAM, STANDALONE, TREE, System
from speed.presets import Preset

from sglang_smc.kv import arena
from sglang_smc.options.server import SMCConfig

#: SGLang's speculative decoding with the settings of its published comparisons with SMC-SD.
SPECULATION: dict[str, dict[str, Any]] = {
    CHAIN: {
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 5,
    },
    TREE: {
        "speculative_algorithm": "STANDALONE",
        "speculative_num_steps": 6,
        "speculative_eagle_topk": 10,
        "speculative_num_draft_tokens": 32,
    },
    NGRAM: {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12},
}
#: Tokens per round in those comparisons, for Llama 8B + 1B at temperature 0.7. SGLang can simulate
#: this acceptance for any weights.
SIMULATED_ACCEPTANCE = {CHAIN: 2.86, TREE: 4.47}


@dataclass(frozen=True)
class Launch:
    """Arguments and environment of an engine's process."""

    arguments: dict[str, Any]
    environment: dict[str, str]


def settings(system: System, preset: Preset) -> dict[str, Any]:
    """Return the keywords of `sgl.Engine` except the model folders."""
    content: dict[str, Any] = {
        "device": preset.device,
        "dtype": preset.dtype,
        "load_format": "dummy" if preset.pair.is_dummy else "auto",
        "random_seed": 0,
        "max_running_requests": preset.max_batch,
        "context_length": preset.context_length,
        "max_total_tokens": preset.pool_tokens(_arena(system)),
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # an idle engine must not keep a core busy
        "watchdog_timeout": 900,
        "log_level": "error",
        **SPECULATION.get(system.family, {}),
    }
    if system.family in MODES:
        content |= {
            "speculative_algorithm": "SMC",
            "speculative_num_steps": system.num_steps,
            "speculative_smc_num_particles": system.num_particles,
            "speculative_smc_mode": MODES[system.family],
        }
    if system.family == BLOCK:
        # The paper's rule: whole blocks are kept at any evidence.
        content["speculative_smc_evidence_threshold"] = 0.0
    return {**content, **preset.engine}


def _arena(system: System) -> int:
    """Return the KV slots of a request beyond its text."""
    if system.num_particles is None or system.num_steps is None:
        tokens = SPECULATION.get(system.family, {}).get("speculative_num_draft_tokens", 0)
        return 4 * tokens  # SGLang reserves twice a round's draft tokens, ahead and again
    sizes = SMCConfig(num_particles=system.num_particles, num_steps=system.num_steps)
    return arena.max_arena(sizes)


def environment(system: System, preset: Preset) -> dict[str, str]:
    """Return environment variables that select plugins or simulate acceptance."""
    if system.family == AR_STOCK:
        # On a CPU nothing runs without our platform; there only SMC is left out.
        return {"SGLANG_PLUGINS": "smc_cpu" if preset.device == "cpu" else "none"}
    simulated = simulated_acceptance(system, preset)
    return {} if simulated is None else {"SGLANG_SIMULATE_ACC_LEN": str(simulated)}


def simulated_acceptance(system: System, preset: Preset) -> float | None:
    """Return the simulated tokens per round of STANDALONE with dummy weights, else None."""
    if system.family in STANDALONE and preset.pair.is_dummy:
        return SIMULATED_ACCEPTANCE[system.family]
    return None


def launch(system: System, preset: Preset, models: tuple[Path, Path]) -> Launch:
    """Return the launch of a system's engine; ``models`` are the folders of target and draft."""
    arguments = {"model_path": str(models[0]), **settings(system, preset)}
    if system.family in (*STANDALONE, *MODES):
        arguments["speculative_draft_model_path"] = str(models[1])
    return Launch(arguments, environment(system, preset))
