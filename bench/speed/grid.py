"""Define presets (models, device, sizes), the compared systems, and the engine of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dummies import END, PADDING, llama_config, write_model
from study import BenchError, slug_of

from sglang_smc.dtype import default_dtype
from sglang_smc.kv import arena
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.demo.serving import Launch
from sglang_smc_tools.plan.shapes import BUILT_IN, ModelShape, from_config

# --- Models

#: The folders of a pair.
TARGET = "target"
DRAFT = "draft"
HEAD = "eagle3"
BLOCK_HEAD = "dspark"
HEADS = (HEAD, BLOCK_HEAD)
#: Of published heads for 8B: the draft vocabulary of EAGLE-3, the sizes of DSpark.
HOT_TOKENS = 32_000
BLOCK_SIZES = {"num_layers": 5, "markov_rank": 256}


class RandomWeights(NamedTuple):
    """Random weights that are written, for drafts that are kept now and then; see `peaked`."""

    config: dict[str, Any]
    spread: float  # standard deviation of layers' weights


class Pair(NamedTuple):
    """A target and a draft with one vocabulary, with dummy or random weights or from folders."""

    name: str
    target: ModelShape
    draft: ModelShape
    folders: tuple[Path, Path] | None = None  # of real weights
    drawn: RandomWeights | None = None

    @property
    def weights(self) -> str:
        """Return the kind of weights: real, random, or dummy, which SGLang makes up."""
        return "real" if self.folders else "random" if self.drawn else "dummy"

    @property
    def quantization(self) -> str | None:
        """Return the quantization of the target's layers; None for 16 bits or more."""
        return "fp8" if self.target.weight_bytes < 2 else None


def _small(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(layers, hidden, mlp, heads, kv_heads, 64, 16384, tied_embeddings=False)


_8B, _1B, _70B = (BUILT_IN[f"llama-{name}"] for name in ("3.1-8b", "3.2-1b", "3.1-70b"))
CPU_PAIR = Pair("0.1B+0.01B", _small(12, 768, 2048, 12, 4), _small(4, 256, 704, 4, 2))
PAIR_8B = Pair("8B+1B", _8B, _1B)
PAIR_70B = Pair("70B+1B", replace(_70B, weight_bytes=1.0), _1B)

_QWEN3: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "pad_token_id": PADDING,
    "eos_token_id": END,
    "bos_token_id": None,
}
_EXPERTS = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
DENSE = {"model_type": "qwen3", "num_hidden_layers": 12, **_QWEN3}
EXPERTS = {"model_type": "qwen3_moe", "num_hidden_layers": 4, **_EXPERTS, **_QWEN3}


def _drawn(name: str, architecture: str, drawn: RandomWeights) -> Pair:
    target = from_config({"architectures": [architecture], **drawn.config})
    return Pair(name, target, replace(target, num_layers=1), drawn=drawn)


#: A draft token is kept with probability 0.76 at the temperature of the benchmark.
DENSE_PAIR = _drawn("dense", "Qwen3ForCausalLM", RandomWeights(DENSE, 0.016))
EXPERTS_PAIR = _drawn("experts", "Qwen3MoeForCausalLM", RandomWeights(EXPERTS, 0.025))


def write_models(pair: Pair, models: Path, head: str | None = None) -> None:
    """Write dummies of target and draft, and a random head; check folders of real weights.

    An EAGLE-3 head's token map is among its weights, so that dummy weights would not do.
    """
    for model in pair.folders or ():
        if not (model / "config.json").is_file():
            raise BenchError(f"{model} holds no model: it has no config.json.")
    folder = models / pair.name
    if pair.drawn is not None and not (folder / DRAFT / "model.safetensors").exists():
        from speed.peaked import write_pair  # imports torch

        write_pair(*pair.drawn, folder / TARGET, folder / DRAFT)
    elif pair.weights == "dummy":
        write_model(folder / TARGET, llama_config(pair.target))
        write_model(folder / DRAFT, llama_config(pair.draft))
        if head in HEADS and not (folder / head / "model.safetensors").exists():
            from sglang_smc_tools.distill.checkpoints import new_head  # imports torch

            hot = {"hot_tokens": range(min(HOT_TOKENS, pair.target.vocab_size))}
            new_head(head, folder / TARGET, folder / head, **(hot if head == HEAD else BLOCK_SIZES))


# --- Presets

#: Factor of the KV pool for slots that the scheduler keeps free.
POOL_SLACK = 1.1


@dataclass(frozen=True)
class Preset:
    """Settings of a run. (N, K) are the particles and the tokens drafted per round."""

    name: str
    pair: Pair
    device: str
    dtype: str | None  # None: the fastest of this CPU
    block_sizes: tuple[tuple[int, int], ...]
    exact_sizes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]  # tokens
    new_tokens: int
    repeats: int
    engine: dict[str, Any] = field(default_factory=dict, hash=False)
    # N and K of an adaptive server, beside which `exact_sizes` alone are measured, ascending.
    adaptive: tuple[int, int] | None = None

    @property
    def number_format(self) -> str:
        """Return the dtype in force."""
        return self.dtype or default_dtype()

    @property
    def context_length(self) -> int:
        """Return the context length: the longest prompt and answer, and a round's drafts."""
        return max(self.prompts) + self.new_tokens + 64

    def pool_tokens(self, arena: int) -> int:
        """Return the KV slots of the largest batch, each request with an ``arena`` of slots."""
        return int(POOL_SLACK * max(self.batches) * (self.context_length + arena))


CPU = Preset(
    name="cpu",
    pair=CPU_PAIR,
    device="cpu",
    dtype=None,
    block_sizes=tuple((n, k) for n in (1, 4, 8) for k in (4, 8)),
    exact_sizes=((4, 8), (8, 8)),
    batches=(1, 8),
    prompts=(256,),
    new_tokens=96,
    repeats=3,
    engine={"disable_cuda_graph": True},
)
GPU = Preset(
    name="h200-8b",
    pair=PAIR_8B,
    device="cuda",
    dtype="bfloat16",
    # The sweep of the reference implementation's speed script.
    block_sizes=((8, 8), (8, 10), (6, 10), (8, 12), (8, 16), (6, 8), (4, 8), (6, 12)),
    exact_sizes=((8, 8), (4, 8)),
    batches=(1, 4, 8, 16, 32),
    prompts=(256, 1024, 4096),
    new_tokens=512,
    repeats=3,
    engine={"mem_fraction_static": 0.55},
)
CPU_EXPERTS = Preset(
    name="cpu-experts",
    pair=EXPERTS_PAIR,
    device="cpu",
    dtype=None,
    block_sizes=(),
    exact_sizes=tuple((n, 4) for n in (1, 2, 4, 8)),
    batches=(1, 4, 16),
    prompts=(32,),
    new_tokens=32,
    repeats=6,
    engine={"disable_cuda_graph": True},
    adaptive=(8, 4),
)
CPU_DENSE = replace(CPU_EXPERTS, name="cpu-dense", pair=DENSE_PAIR)
PRESETS = {preset.name: preset for preset in (CPU, CPU_EXPERTS, CPU_DENSE, GPU)}


def quick(preset: Preset) -> Preset:
    """Return the preset reduced to one setting of each mode, as a trial."""
    return replace(
        preset,
        name=f"{preset.name}-quick",
        block_sizes=((4, 4),),
        exact_sizes=((4, 4),),
        batches=(1,),
        prompts=preset.prompts[:1],
        new_tokens=48,
        repeats=2,
    )


# --- Systems and cells

AR = "AR"
AR_STOCK = "AR without the plugin"
CHAIN = "STANDALONE chain"
TREE = "STANDALONE tree"
NGRAM = "NGRAM"
BLOCK = "SMC block"
EXACT = "SMC exact"
AUTO = "SMC auto"
#: Of bench/gpu alone. One head with random weights drafts for SGLang's EAGLE-3 and for SMC.
AR_DRAFT = "AR of the draft"
ADAPTIVE = "SMC adaptive"
EAGLE = "EAGLE-3"
EAGLE_TREE = "EAGLE-3 tree of 64"
EXACT_BLOCK = "SMC exact with DSpark"
EXACT_HEAD = "SMC exact with a head"
SERVED = "SMC exact adaptive with a head"
EXACT_ADAPTIVE = "SMC exact adaptive"
ADAPTS = (ADAPTIVE, EXACT_ADAPTIVE, SERVED)
#: Whole blocks, too, with the draft's layers fused; or as the server chooses, which says how.
FUSED = "SMC fused"
CHOSEN = "SMC with chosen layers"
LAYERS = {FUSED: "fused", CHOSEN: "auto"}
STANDALONE = (CHAIN, TREE)
EAGLES = (EAGLE, EAGLE_TREE)
_EXACT = dict.fromkeys((EXACT, EXACT_HEAD, EXACT_BLOCK, EXACT_ADAPTIVE, SERVED), "exact")
SMC = {BLOCK: "smc", FUSED: "smc", CHOSEN: "smc", ADAPTIVE: "smc", AUTO: "auto", **_EXACT}


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

    @property
    def draft(self) -> str | None:
        """Return the folder of its draft in the pair; None without one."""
        if self.family in (*EAGLES, EXACT_HEAD, SERVED):
            return HEAD
        if self.family == EXACT_BLOCK:
            return BLOCK_HEAD
        return DRAFT if self.family in (*STANDALONE, *SMC) else None


@dataclass(frozen=True)
class SpeedCell:
    """One system with ``batch`` requests at a time, of ``prompt`` tokens each."""

    system: System
    batch: int
    prompt: int

    @property
    def slug(self) -> str:
        return f"{self.system.slug}-b{self.batch}-p{self.prompt}"


PLAIN = System(AR)


def systems(preset: Preset) -> list[System]:
    """Return all compared systems, plain decoding first; those of a grid have it beside them."""
    if preset.adaptive is not None:
        fixed = [System(EXACT, n, k) for n, k in preset.exact_sizes]
        return [*fixed, System(EXACT_ADAPTIVE, *preset.adaptive)]
    return [
        *(System(family) for family in (AR, AR_STOCK, *STANDALONE, NGRAM)),
        *(System(BLOCK, n, k) for n, k in preset.block_sizes),
        *(System(mode, n, k) for mode in (EXACT, AUTO) for n, k in preset.exact_sizes),
    ]


def cells(preset: Preset, batches: Iterable[int], prompts: Iterable[int]) -> list[SpeedCell]:
    """Return the cells of these batches and prompts, grouped by engine."""
    sizes = [(batch, prompt) for batch in batches for prompt in prompts]
    return [SpeedCell(system, *size) for system in systems(preset) for size in sizes]


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
    EAGLE_TREE: {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 8,
        "speculative_num_draft_tokens": 64,
    },
}
#: Tokens per round in those comparisons, for Llama 8B + 1B at temperature 0.7. SGLang can simulate
#: this acceptance for any weights.
SIMULATED_ACCEPTANCE = {CHAIN: 2.86, TREE: 4.47}


def settings_of(launch: Launch) -> dict[str, Any]:
    """Return the arguments of an engine that its results depend on."""
    others = ("model_path", "log_level")
    return {k: v for k, v in launch.arguments.items() if not k.endswith(others)}


def settings(system: System, preset: Preset) -> dict[str, Any]:
    """Return the arguments of an engine except the model folders."""
    content: dict[str, Any] = {
        "device": preset.device,
        "dtype": preset.number_format,
        "load_format": "dummy" if preset.pair.weights == "dummy" else "auto",
        "random_seed": 0,
        "max_running_requests": max(preset.batches),
        "context_length": preset.context_length,
        "max_total_tokens": preset.pool_tokens(_arena(system)),
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # an idle engine must not keep a core busy
        "watchdog_timeout": 900,
        "log_level": "info",
        **SPECULATION.get(system.family, {}),
    }
    if system.family in SMC:
        content |= {
            "speculative_algorithm": "SMC",
            "speculative_num_steps": system.num_steps,
            "speculative_smc_num_particles": system.num_particles,
            "speculative_smc_mode": SMC[system.family],
            "speculative_smc_adaptive": "on" if system.family in ADAPTS else "off",
        }
    if system.family in LAYERS:
        content["speculative_smc_draft_layers"] = LAYERS[system.family]
    if system.family in (BLOCK, *LAYERS, ADAPTIVE):
        # The paper's rule: whole blocks are kept at any evidence.
        content["speculative_smc_evidence_threshold"] = 0.0
    if system.draft in HEADS:
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
    if preset.pair.drawn is not None:
        # Engines side by side share no cores, and compile nothing for each number of rows.
        return {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    simulated = simulated_acceptance(system, preset)
    return {} if simulated is None else {"SGLANG_SIMULATE_ACC_LEN": str(simulated)}


def simulated_acceptance(system: System, preset: Preset) -> float | None:
    """Return the simulated tokens per round of STANDALONE with dummy weights, else None."""
    is_dummy = preset.pair.weights == "dummy"
    return SIMULATED_ACCEPTANCE.get(system.family) if is_dummy else None


def launch_of(system: System, preset: Preset, models: Path) -> Launch:
    """Return the launch of a system's engine, with dummy models in a folder."""
    folder = models / preset.pair.name
    target, draft = preset.pair.folders or (folder / TARGET, folder / DRAFT)
    served = draft if system.family == AR_DRAFT else target
    arguments = {"model_path": str(served), **settings(system, preset)}
    if system.draft:
        path = folder / system.draft if system.draft in HEADS else draft
        arguments["speculative_draft_model_path"] = str(path)
    return Launch(arguments, environment(system, preset))
