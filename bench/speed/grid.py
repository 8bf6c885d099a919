"""Define the cells, one for each system, batch and prompt length, and the systems' engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed.presets import Preset
from study import slug_of

from sglang_smc.kv import arena
from sglang_smc.options.server import SMCConfig

AR, AR_STOCK = "AR", "AR without the plugin"
CHAIN, TREE, NGRAM = "STANDALONE chain", "STANDALONE tree", "NGRAM"
BLOCK, EXACT, AUTO = "SMC block", "SMC exact", "SMC auto"
#: Of bench/gpu alone. One head with random weights drafts for SGLang's EAGLE-3 and for SMC.
AR_DRAFT, ADAPTIVE, EAGLE = "AR of the draft", "SMC adaptive", "EAGLE-3"
EXACT_HEAD = "SMC exact with a head"
STANDALONE = (CHAIN, TREE)
MODES = {BLOCK: "smc", EXACT: "exact", AUTO: "auto", ADAPTIVE: "smc", EXACT_HEAD: "exact"}
SMC = tuple(MODES)
#: The folders of a pair.
TARGET, DRAFT, HEAD = "target", "draft", "eagle3"


@dataclass(frozen=True)
class System:
    """One way to decode, with an engine of its own."""

    family: str
    num_particles: int | None = None
    num_steps: int | None = None

    @property
    def name(self) -> str:
        """Return a display name: ``SMC block N=8 K=4``."""
        if self.num_particles is None:
            return self.family
        return f"{self.family} N={self.num_particles} K={self.num_steps}"

    @property
    def slug(self) -> str:
        """Return the name for files and patterns: ``smc-block-n8-k4``."""
        return slug_of(self.name)


@dataclass(frozen=True)
class Cell:
    """One system with ``batch`` requests at a time, of ``prompt`` tokens each."""

    system: System
    batch: int
    prompt: int

    @property
    def slug(self) -> str:
        return f"{self.system.slug}-b{self.batch}-p{self.prompt}"

    @property
    def name(self) -> str:
        return f"{self.system.name}, batch {self.batch}, prompts of {self.prompt}"

    @property
    def reference(self) -> Cell:
        """Return the cell of plain decoding of the same requests."""
        return Cell(PLAIN, self.batch, self.prompt)


PLAIN = System(AR)


def systems(preset: Preset) -> list[System]:
    """Return all compared systems, plain decoding first."""
    return [
        PLAIN,
        System(AR_STOCK),
        *(System(family) for family in (*STANDALONE, NGRAM)),
        *(System(BLOCK, n, k) for n, k in preset.block_sizes),
        *(System(mode, n, k) for mode in (EXACT, AUTO) for n, k in preset.exact_sizes),
    ]


def cells(
    preset: Preset, batches: Iterable[int] | None = None, prompts: Iterable[int] | None = None
) -> list[Cell]:
    """Return the cells of these batches and prompts, grouped by engine."""
    return [
        Cell(system, batch, prompt)
        for system in systems(preset)
        for batch in (preset.batches if batches is None else batches)
        for prompt in (preset.prompts if prompts is None else prompts)
    ]


# --- Engines

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
    EAGLE: {"speculative_algorithm": "EAGLE3"},  # SGLang chooses steps and tree
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
    if system.family in (BLOCK, ADAPTIVE):
        # The paper's rule: whole blocks are kept at any evidence.
        content["speculative_smc_evidence_threshold"] = 0.0
    if system.family == ADAPTIVE:
        content["speculative_smc_adaptive"] = True
    if drafted_by(system) == HEAD:
        content["speculative_draft_load_format"] = "auto"
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


def drafted_by(system: System) -> str | None:
    """Return the folder of a system's draft in its pair; None without one."""
    if system.family in (EAGLE, EXACT_HEAD):
        return HEAD
    return DRAFT if system.family in (*STANDALONE, *MODES) else None


def launch(system: System, preset: Preset, models: Mapping[str, Path]) -> Launch:
    """Return the launch of a system's engine, with the folders of target, draft and head."""
    served, draft = DRAFT if system.family == AR_DRAFT else TARGET, drafted_by(system)
    arguments = {"model_path": str(models[served]), **settings(system, preset)}
    if draft:
        arguments["speculative_draft_model_path"] = str(models[draft])
    return Launch(arguments, environment(system, preset))
