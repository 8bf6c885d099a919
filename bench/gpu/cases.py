"""Define the measured engines, with batches and prompts, the most important first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speed import grid, presets
from speed.grid import (
    ADAPTIVE,
    AR,
    AR_DRAFT,
    AUTO,
    BLOCK,
    CHAIN,
    DRAFT,
    EAGLE,
    EXACT,
    EXACT_HEAD,
    HEAD,
    SMC,
    STANDALONE,
    TARGET,
    TREE,
    Cell,
    Launch,
    System,
)
from speed.presets import PAIR_70B, PRESETS, Pair, Preset

from sglang_smc.dtype import default_dtype
from sglang_smc.tools.plan.shapes import ModelShape

#: Systems without kernels on SGLang's CPU platform.
GPU_ALONE = (*STANDALONE, EAGLE)
N = K = 8
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


def system_of(family: str) -> System:
    """Return a system of this family, at N = K = 8 if it has particles."""
    return System(family, N, K) if family in SMC else System(family)


def _case(family: str, sizes: Sizes, start_seconds: float = 45.0, **engine: Any) -> EngineCase:
    return EngineCase(system_of(family), sizes, start_seconds, engine=engine)


#: SGLang's default backend, flashinfer, first compiles its tree kernels for minutes.
OF_TREES = {"attention_backend": "fa3"}
PLAIN, STOCK_DRAFT = _case(AR, (*ALL, (64, 256))), _case(CHAIN, SHORT)
SPEED = (
    _case(AR_DRAFT, SHORT),  # K of its passes are a lower bound of the drafting time
    PLAIN,
    _case(BLOCK, ALL),
    _case(EXACT, ALL),
    _case(EXACT_HEAD, SHORT, 55.0),
    _case(EAGLE, SHORT, 55.0, **OF_TREES),
    _case(ADAPTIVE, ((32, 256), (64, 256), (1, 256)), 70.0),  # a graph for each budget and batch
)
MORE = (STOCK_DRAFT, _case(TREE, SHORT, **OF_TREES), _case(AUTO, ((1, 256), (1, 4096))))
PROFILE = (_case(BLOCK, ((1, 256), (1, 4096))), _case(EXACT, ONE))
LARGE = tuple(
    replace(case, sizes=ONE, start_seconds=50.0, sample_seconds=15.0)
    for case in (PLAIN, _case(BLOCK, ONE), _case(EXACT, ONE), STOCK_DRAFT)
)

#: Prefill runs without graphs, which take most of a start; only decoding is measured.
FAST_START = {"disable_prefill_cuda_graph": True, "mem_fraction_static": 0.8}
SPEED_8B = replace(PRESETS["h200-8b"], new_tokens=256, repeats=3, engine=FAST_START)
PROFILE_8B = replace(SPEED_8B, new_tokens=512, repeats=2)
LARGE_START = {**FAST_START, "mem_fraction_static": 0.9}
SPEED_70B = replace(SPEED_8B, name="h200-70b", pair=PAIR_70B, repeats=2, engine=LARGE_START)
TINY_PAIR = Pair(
    "tiny",
    ModelShape(2, 64, 128, 2, 1, 32, 1024, tied_embeddings=False),
    ModelShape(1, 32, 64, 1, 1, 32, 1024, tied_embeddings=False),
)
TINY = replace(
    PRESETS["cpu"], name="tiny", pair=TINY_PAIR, dtype=default_dtype(), new_tokens=24, repeats=1
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
    graphs = {} if preset.device == "cpu" else {"cuda_graph_bs_decode": list(batches)}
    engine = {**preset.engine, **graphs, **case.engine}
    return replace(preset, batches=batches, prompts=prompts, engine=engine)


def launch_of(case: EngineCase, preset: Preset, models: Path) -> Launch:
    """Return the launch of the case's engine, with its models in folders under ``models``."""
    folders = {name: models / preset.pair.name / name for name in (TARGET, DRAFT, HEAD)}
    return grid.launch(case.system, preset_of(case, preset), folders)


def write_models(pair: Pair, models: Path, *, has_head: bool = False) -> None:
    """Write target and draft as folders of dummies, and a random EAGLE-3 head.

    The head's token map is among its weights, so that dummy weights would not do.
    """
    presets.write_models(pair, models)
    folder = models / pair.name
    if has_head and not (folder / HEAD / "model.safetensors").exists():
        from sglang_smc.tools.distill.checkpoints import new_head  # imports torch

        hot = range(min(HOT_TOKENS, pair.target.vocab_size))
        new_head("eagle3", folder / TARGET, folder / HEAD, hot_tokens=hot)
