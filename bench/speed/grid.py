"""Define the cells, one for each system, batch and prompt length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speed.presets import Preset
from study import slug_of

AR, AR_STOCK = "AR", "AR without the plugin"
CHAIN, TREE, NGRAM = "STANDALONE chain", "STANDALONE tree", "NGRAM"
BLOCK, EXACT, AUTO = "SMC block", "SMC exact", "SMC auto"
STANDALONE = (CHAIN, TREE)
MODES = {BLOCK: "smc", EXACT: "exact", AUTO: "auto"}
SMC = tuple(MODES)


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
    preset: Preset,
    batches: Iterable[int] | None = None,
    prompts: Iterable[int] | None = None,
) -> list[Cell]:
    """Return the cells of these batches and prompts, grouped by engine."""
    return [
        Cell(system, batch, prompt)
        for system in systems(preset)
        for batch in (preset.batches if batches is None else batches)
        for prompt in (preset.prompts if prompts is None else prompts)
    ]
