"""Define the measured engines, with batches and prompts, the most important first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speed import presets
from speed.engines import Launch, environment, settings
from speed.grid import AR, AUTO, BLOCK, CHAIN, EXACT, STANDALONE, TREE, Cell, System
from speed.presets import PRESETS, Pair, Preset

from sglang_smc.dtype import default_dtype
from sglang_smc.tools.plan.shapes import ModelShape

AR_DRAFT, ADAPTIVE = "AR of the draft", "SMC adaptive"
#: One head with random weights, for SGLang's EAGLE-3 and for SMC.
EAGLE, EXACT_HEAD = "EAGLE-3", "SMC exact with a head"
#: Systems without kernels on SGLang's CPU platform.
GPU_ALONE = (*STANDALONE, EAGLE)
N = K = 8
TARGET, DRAFT, HEAD = "target", "draft", "eagle3"
#: Draft vocabulary of published heads for Llama 3.1 8B.
HOT_TOKENS = 32_000

Sizes = tuple[tuple[int, int], ...]
ONE: Sizes = ((1, 256),)
#: By importance: the headline, long prompts, then large batches.
ALL: Sizes = ((1, 256), (1, 4096), (8, 256), (32, 256), (8, 4096), (32, 4096))
SHORT: Sizes = ((1, 256), (8, 256), (32, 256))


@dataclass(frozen=True)
class EngineCase:
    """An engine, and its cells as (batch, prompt tokens)."""

    system: System
    sizes: Sizes
    start_seconds: float = 45.0
    sample_seconds: float = 5.0  # per cell: warm-up and repeats
    served: str = TARGET
    drafted: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return self.system.slug

    @property
    def cells(self) -> list[Cell]:
        return [Cell(self.system, batch, prompt) for batch, prompt in self.sizes]

    @property
    def seconds(self) -> float:
        return self.start_seconds + self.sample_seconds * len(self.sizes)

    @property
    def has_plugin(self) -> bool:
        """Return whether the measurement depends on the plugin's code."""
        return self.system.num_particles is not None


def _smc(family: str, sizes: Sizes, **engine: Any) -> EngineCase:
    return EngineCase(System(family, N, K), sizes, drafted=DRAFT, engine=engine)


#: A family that bench/speed lacks. Captures a graph for each budget and batch size, which is slow.
ADAPTING = _smc(
    ADAPTIVE,
    ((32, 256), (64, 256), (1, 256)),
    speculative_algorithm="SMC",
    speculative_num_steps=K,
    speculative_smc_num_particles=N,
    speculative_smc_mode="smc",
    speculative_smc_evidence_threshold=0.0,
    speculative_smc_adaptive=True,
)
BESIDE_EAGLE = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": K,
    "speculative_smc_num_particles": N,
    "speculative_smc_mode": "exact",
}
#: SGLang chooses steps and tree. Its default backend, flashinfer, first compiles its tree kernels
#: for minutes.
OF_EAGLE = {"speculative_algorithm": "EAGLE3", "attention_backend": "fa3"}
HEADS = tuple(
    EngineCase(
        system,
        SHORT,
        start_seconds=55.0,
        drafted=HEAD,
        engine={**engine, "speculative_draft_load_format": "auto"},
    )
    for system, engine in (
        (System(EXACT_HEAD, N, K), BESIDE_EAGLE),
        (System(EAGLE), OF_EAGLE),
    )
)
PLAIN = EngineCase(System(AR), (*ALL, (64, 256)))
#: K of its passes are a lower bound of the drafting time.
DRAFT_ALONE = EngineCase(System(AR_DRAFT), SHORT, served=DRAFT)
STOCK_DRAFT = EngineCase(System(CHAIN), SHORT, drafted=DRAFT)
SPEED = (
    DRAFT_ALONE,
    PLAIN,
    _smc(BLOCK, ALL),
    _smc(EXACT, ALL),
    *HEADS,
    replace(ADAPTING, start_seconds=70.0),
)
MORE = (
    STOCK_DRAFT,
    EngineCase(System(TREE), SHORT, drafted=DRAFT, engine={"attention_backend": "fa3"}),
    _smc(AUTO, ((1, 256), (1, 4096))),
)
PROFILE = (
    _smc(BLOCK, ((1, 256), (1, 4096))),
    _smc(EXACT, ONE),
)
LARGE = tuple(
    replace(case, sizes=ONE, start_seconds=50.0, sample_seconds=15.0)
    for case in (PLAIN, _smc(BLOCK, ONE), _smc(EXACT, ONE), STOCK_DRAFT)
)

#: Prefill runs without graphs, which take most of a start; only decoding is measured.
FAST_START = {"disable_prefill_cuda_graph": True, "mem_fraction_static": 0.8}
TINY_PAIR = Pair(
    "tiny",
    ModelShape(2, 64, 128, 2, 1, 32, 1024, tied_embeddings=False),
    ModelShape(1, 32, 64, 1, 1, 32, 1024, tied_embeddings=False),
)
SPEED_8B = replace(PRESETS["h200-8b"], new_tokens=256, repeats=3, engine=FAST_START)
PROFILE_8B = replace(SPEED_8B, new_tokens=512, repeats=2)
SPEED_70B = replace(
    PRESETS["h200-70b"],
    new_tokens=256,
    repeats=2,
    engine={**FAST_START, "mem_fraction_static": 0.9},
)
TINY = replace(
    PRESETS["cpu"],
    name="tiny",
    pair=TINY_PAIR,
    dtype=default_dtype(),
    new_tokens=24,
    repeats=1,
)


def on_a_cpu(cases: Sequence[EngineCase]) -> list[EngineCase]:
    """Return the cases that run on a CPU, with one size or two."""
    return [
        replace(case, sizes=tuple(dict.fromkeys((min(b, 2), 32) for b, _ in case.sizes)))
        for case in cases
        if case.system.family not in GPU_ALONE
    ]


def preset_of(case: EngineCase, preset: Preset) -> Preset:
    """Return the preset with an engine for only this case's sizes."""
    batches = tuple(sorted({batch for batch, _ in case.sizes}))
    prompts = tuple(sorted({prompt for _, prompt in case.sizes}))
    on_gpu = preset.device != "cpu"
    graphs = {"cuda_graph_bs_decode": list(batches)} if on_gpu else {}
    engine = {**preset.engine, **graphs, **case.engine}
    return replace(preset, batches=batches, prompts=prompts, engine=engine)


def launch_of(case: EngineCase, preset: Preset, models: Path) -> Launch:
    """Return the launch of the case's engine, with its models in folders under ``models``."""
    sized = preset_of(case, preset)
    folder = models / preset.pair.name
    arguments = {"model_path": str(folder / case.served), **settings(case.system, sized)}
    if case.drafted:
        arguments["speculative_draft_model_path"] = str(folder / case.drafted)
    return Launch(arguments, environment(case.system, sized))


def write_models(pair: Pair, models: Path, drafted: str | None = None) -> None:
    """Write target and draft as folders of dummies and, if drafted, a random EAGLE-3 head.

    The head's token map is among its weights, so that dummy weights would not do.
    """
    presets.write_models(pair, models)
    folder = models / pair.name
    if drafted == HEAD and not (folder / HEAD / "model.safetensors").exists():
        from sglang_smc.tools.distill.checkpoints import new_eagle3  # imports torch

        hot = range(min(HOT_TOKENS, pair.target.vocab_size))
        new_eagle3(folder / TARGET, folder / HEAD, hot_tokens=hot)
