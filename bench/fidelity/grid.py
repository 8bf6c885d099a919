"""Define the cells, one for each setting and temperature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from study import slug_of

from sglang_smc.options.server import (
    AUTO_EVIDENCE_THRESHOLD,
    DEFAULTS,
    EVIDENCE_THRESHOLD,
    LONG_LAG,
)

TEMPERATURES = (0.7, 1.0)
AR_TARGET, AR_DRAFT, EXACT = "AR target", "AR draft", "exact"
MIXED, AUTO, SMC, DEFAULT = "mixed", "auto", "smc", "smc default"
LATE = f"smc lag {LONG_LAG}"  # the default with a longer lag
#: Evidence thresholds besides those of `auto` and of the default; 0 is the paper's algorithm.
MIXED_THRESHOLDS = (4.0, 1.0, 0.5)
SMC_THRESHOLDS = (1.0, 0.0)
#: N and K are the server's defaults throughout.
SIZES = {"num_particles": DEFAULTS.num_particles, "num_steps": DEFAULTS.num_steps}


@dataclass(frozen=True)
class Kind:
    """A setting without a temperature; ``smc`` holds the SMC request fields."""

    family: str
    engine: str  # "target", "draft" or "smc"
    smc: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """Return a display name: ``mixed c=1``."""
        asked = (self.smc or {}).get("evidence_threshold")
        return self.family if asked is None else f"{self.family} c={asked:g}"

    @property
    def evidence_threshold(self) -> float | None:
        """Return the evidence threshold c in force, set or default; None without one."""
        unasked = {
            AUTO: AUTO_EVIDENCE_THRESHOLD,
            DEFAULT: EVIDENCE_THRESHOLD,
            LATE: EVIDENCE_THRESHOLD,
        }
        return (self.smc or {}).get("evidence_threshold", unasked.get(self.family))

    @property
    def slug(self) -> str:
        """Return the name for files and patterns: ``mixed-c1``."""
        return slug_of(self.name)


@dataclass(frozen=True)
class Cell:
    """One kind at one temperature."""

    kind: Kind
    temperature: float

    @property
    def engine(self) -> str:
        return self.kind.engine

    @property
    def samples(self) -> int:
        """Return the number of answers to each problem."""
        return 1

    @property
    def slug(self) -> str:
        return f"{self.kind.slug}-t{self.temperature:g}"

    @property
    def name(self) -> str:
        return f"{self.kind.name}, temperature {self.temperature:g}"

    @property
    def is_pure_smc(self) -> bool:
        """Return whether it is the paper's algorithm, in which log Z bounds the divergence."""
        return self.kind.family == SMC and self.kind.evidence_threshold == 0


def kinds() -> list[Kind]:
    """Return all settings, grouped by engine."""
    return [
        Kind(AR_TARGET, "target"),
        Kind(AR_DRAFT, "draft"),
        _kind(EXACT, mode="exact"),
        *(kind for kind in _dial() if not _has_a_name(kind)),
        _kind(AUTO, mode="auto"),
        _kind(DEFAULT),
        _kind(LATE, max_lag=LONG_LAG),
    ]


def _dial() -> list[Kind]:
    """Return the settings with their own evidence threshold."""
    return [
        *(_kind(MIXED, mode="mixed", evidence_threshold=c) for c in MIXED_THRESHOLDS),
        *(
            _kind(SMC, mode="smc", resample_at="block", evidence_threshold=c)
            for c in SMC_THRESHOLDS
        ),
    ]


def _has_a_name(kind: Kind) -> bool:
    """Return whether it equals `auto` or the default, which are measured under these names."""
    named = AUTO_EVIDENCE_THRESHOLD if kind.family == MIXED else EVIDENCE_THRESHOLD
    return kind.evidence_threshold == named


def _kind(family: str, **settings: Any) -> Kind:
    return Kind(family, "smc", {**SIZES, **settings})


def cells(temperatures: Iterable[float], every: Sequence[Kind] = ()) -> list[Cell]:
    """Return these kinds, or all, at each temperature, grouped by engine to start each once."""
    some = every or kinds()
    found = [Cell(kind, t) for t in temperatures for kind in some]
    engines = list(dict.fromkeys(kind.engine for kind in some))
    return sorted(found, key=lambda cell: engines.index(cell.engine))
