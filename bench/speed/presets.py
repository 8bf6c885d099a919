"""Define presets: models, device and settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dummies import write_llama
from study import BenchError

from sglang_smc.dtype import default_dtype
from sglang_smc.tools.plan.shapes import BUILT_IN, ModelShape

#: Factor of the KV pool for slots that the scheduler keeps free.
POOL_SLACK = 1.1


class Pair(NamedTuple):
    """A target and a draft with one vocabulary, with dummy weights or from folders."""

    name: str
    target: ModelShape
    draft: ModelShape
    folders: tuple[Path, Path] | None = None  # of real weights

    @property
    def is_dummy(self) -> bool:
        return self.folders is None

    @property
    def quantization(self) -> str | None:
        """Return the quantization of the target's layers; None for 16 bits or more."""
        return "fp8" if self.target.weight_bytes < 2 else None


def _small(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(layers, hidden, mlp, heads, kv_heads, 64, 16384, tied_embeddings=False)


CPU_PAIR = Pair("0.1B+0.01B", _small(12, 768, 2048, 12, 4), _small(4, 256, 704, 4, 2))
PAIR_8B = Pair("8B+1B", BUILT_IN["llama-3.1-8b"], BUILT_IN["llama-3.2-1b"])
PAIR_70B = Pair(
    "70B+1B", replace(BUILT_IN["llama-3.1-70b"], weight_bytes=1.0), BUILT_IN["llama-3.2-1b"]
)


@dataclass(frozen=True)
class Preset:
    """Settings of a run. (N, K) are the particles and the tokens drafted per round."""

    name: str
    pair: Pair
    device: str
    dtype: str
    block_sizes: tuple[tuple[int, int], ...]
    exact_sizes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]  # tokens
    new_tokens: int
    repeats: int
    engine: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def max_batch(self) -> int:
        return max(self.batches)

    @property
    def context_length(self) -> int:
        """Return the context length: the longest prompt and answer, and a round's drafts."""
        return max(self.prompts) + self.new_tokens + 64

    def pool_tokens(self, arena: int) -> int:
        """Return the KV slots of the largest batch, each request with an ``arena`` of slots."""
        return int(POOL_SLACK * self.max_batch * (self.context_length + arena))


#: The (N, K) sweep of the reference implementation's speed script.
REFERENCE_SWEEP = ((8, 8), (8, 10), (6, 10), (8, 12), (8, 16), (6, 8), (4, 8), (6, 12))
CPU = Preset(
    name="cpu",
    pair=CPU_PAIR,
    device="cpu",
    dtype=default_dtype(),
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
    block_sizes=REFERENCE_SWEEP,
    exact_sizes=((8, 8), (4, 8)),
    batches=(1, 4, 8, 16, 32),
    prompts=(256, 1024, 4096),
    new_tokens=512,
    repeats=3,
    engine={"mem_fraction_static": 0.55},
)
PRESETS = {preset.name: preset for preset in (CPU, GPU)}


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


#: Draft vocabulary of published heads for Llama 3.1 8B.
HOT_TOKENS = 32_000


def write_models(pair: Pair, models: Path, *, has_head: bool = False) -> None:
    """Write dummies of target and draft, and a random EAGLE-3 head; check folders of real weights.

    The head's token map is among its weights, so that dummy weights would not do.
    """
    for model in pair.folders or ():
        if not (model / "config.json").is_file():
            raise BenchError(f"{model} holds no model: it has no config.json.")
    if pair.is_dummy:
        target, draft, head = (models / pair.name / name for name in ("target", "draft", "eagle3"))
        write_llama(target, pair.target)
        write_llama(draft, pair.draft)
        if has_head and not (head / "model.safetensors").exists():
            from sglang_smc.tools.distill.checkpoints import new_head  # imports torch

            hot = range(min(HOT_TOKENS, pair.target.vocab_size))
            new_head("eagle3", target, head, hot_tokens=hot)
