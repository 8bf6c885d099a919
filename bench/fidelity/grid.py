"""What is measured: the cells, one for each setting and temperature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from study import slug_of

from sglang_smc.options.server import AUTO_EVIDENCE_THRESHOLD, DEFAULTS, EVIDENCE_THRESHOLD

#: The SMC engine's own N and K; no request may ask for more.
MAX_PARTICLES, MAX_STEPS = 16, 8
TEMPERATURES = (0.7, 1.0)
EXACT_PARTICLES = (1, 4, 8)
SMC_PARTICLES = (4, 8, 16)
SMC_STEPS = (4, 8)

AR_TARGET, AR_DRAFT, EXACT = "AR target", "AR draft", "exact"
SMC_BLOCK, SMC_TOKEN, SMC_CUT = "SMC block", "SMC token", "SMC cut"
MIXED, AUTO, DEFAULT = "mixed", "auto", "SMC default"
#: Evidence thresholds of the mixed mode, beside that of `auto`.
MIXED_THRESHOLDS = (0.2, 0.5, 1.0)
#: The same of SMC populations; 0 are the two families above.
CUT_THRESHOLDS = (0.5, 1.0)
CUT_FAMILIES = (SMC_CUT, MIXED)


@dataclass(frozen=True)
class Kind:
    """A setting without a temperature; ``smc`` is what its requests ask of the SMC engine."""

    family: str
    engine: str  # "target", "draft" or "smc"
    cost: float  # seconds an answer takes on two CPU cores, for the time to go
    smc: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """As people read it: ``SMC block N=8 K=4``."""
        if not self.smc:
            return self.family
        threshold = f" c={self.smc['evidence_threshold']:g}" if self.family in CUT_FAMILIES else ""
        return f"{self.family}{threshold} N={self.smc['num_particles']} K={self.smc['num_steps']}"

    @property
    def evidence_threshold(self) -> float | None:
        """The c that it runs with, asked for or not; None where there is none."""
        unasked = {AUTO: AUTO_EVIDENCE_THRESHOLD, DEFAULT: EVIDENCE_THRESHOLD}
        return (self.smc or {}).get("evidence_threshold", unasked.get(self.family))

    @property
    def slug(self) -> str:
        """As files and patterns have it: ``smc-block-n8-k4``."""
        return slug_of(self.name)


@dataclass(frozen=True)
class Cell:
    """One kind at one temperature."""

    kind: Kind
    temperature: float

    @property
    def slug(self) -> str:
        return f"{self.kind.slug}-t{self.temperature:g}"

    @property
    def name(self) -> str:
        return f"{self.kind.name}, temperature {self.temperature:g}"

    @property
    def is_pure_smc(self) -> bool:
        """Whether it is the paper's algorithm, whose log Z bounds the divergence."""
        return self.kind.family in (SMC_BLOCK, SMC_TOKEN)


def kinds() -> list[Kind]:
    """All settings, those of one engine together."""
    return [
        Kind(AR_TARGET, "target", 0.05),
        Kind(AR_DRAFT, "draft", 0.02),
        *(_kind(EXACT, n, MAX_STEPS, mode="exact") for n in EXACT_PARTICLES),
        *_weighed(SMC_BLOCK, "block"),
        *_weighed(SMC_TOKEN, "token"),
        *(kind for kind in _cut() if not _has_a_name(kind)),
        _kind(AUTO, DEFAULTS.num_particles, DEFAULTS.num_steps, mode="auto"),
        _kind(DEFAULT, DEFAULTS.num_particles, DEFAULTS.num_steps),
    ]


def _weighed(family: str, resample_at: str) -> list[Kind]:
    return [
        # Nothing is cut for its evidence in the paper.
        _kind(family, n, k, mode="smc", resample_at=resample_at, evidence_threshold=0)
        for n in SMC_PARTICLES
        for k in SMC_STEPS
    ]


def _cut() -> list[Kind]:
    """Those with an evidence threshold of their own."""
    return [
        *(_kind(SMC_CUT, 8, 8, mode="smc", evidence_threshold=c) for c in CUT_THRESHOLDS),
        _kind(SMC_CUT, 16, 8, mode="smc", evidence_threshold=EVIDENCE_THRESHOLD),
        *(_kind(MIXED, 8, 8, mode="mixed", evidence_threshold=c) for c in MIXED_THRESHOLDS),
    ]


def _has_a_name(kind: Kind) -> bool:
    """Whether it is `auto`, or the default, under another name: nothing is measured twice."""
    smc = kind.smc or {}
    threshold = AUTO_EVIDENCE_THRESHOLD if kind.family == MIXED else EVIDENCE_THRESHOLD
    return (smc["num_particles"], smc["num_steps"], smc["evidence_threshold"]) == (
        DEFAULTS.num_particles,
        DEFAULTS.num_steps,
        threshold,
    )


def _kind(family: str, num_particles: int, num_steps: int, **settings: Any) -> Kind:
    smc = {"num_particles": num_particles, "num_steps": num_steps, **settings}
    return Kind(family, "smc", _cost(num_particles), smc)


def _cost(num_particles: int) -> float:
    return 0.04 + 0.012 * num_particles


def cells(temperatures: Iterable[float]) -> list[Cell]:
    """All cells, engine by engine: each starts only once."""
    found = [Cell(kind, t) for t in temperatures for kind in kinds()]
    engines = list(dict.fromkeys(kind.engine for kind in kinds()))
    return sorted(found, key=lambda cell: engines.index(cell.kind.engine))
