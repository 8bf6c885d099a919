"""Define the cells: each mode, and plain decoding, at each temperature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import answers

from sglang_smc.options.server import (
    AUTO_EVIDENCE_THRESHOLD,
    DEFAULTS,
    EVIDENCE_THRESHOLD,
    LONG_LAG,
)

AR_TARGET, AR_DRAFT, EXACT = "AR target", "AR draft", "exact"
MIXED, AUTO, SMC, DEFAULT = "mixed", "auto", "smc", "smc default"
LATE = f"smc lag {LONG_LAG}"  # the default with a longer lag
#: Evidence thresholds besides those of `auto` and of the default; 0 is the paper's algorithm.
MIXED_THRESHOLDS = (4.0, 1.0, 0.5)
SMC_THRESHOLDS = (1.0, 0.0)
#: N and K are the server's defaults throughout.
SIZES = {"num_particles": DEFAULTS.num_particles, "num_steps": DEFAULTS.num_steps}
SMC_ENGINE: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": SIZES["num_steps"],
    "speculative_smc_num_particles": SIZES["num_particles"],
}


@dataclass(frozen=True)
class Cell(answers.Cell):
    """A setting at a temperature; the engine is "target", "draft" or "smc"."""

    family: str = ""
    evidence_threshold: float | None = None  # in force, set or default


def cells(temperatures: Iterable[float]) -> list[Cell]:
    """Return all settings at each temperature, grouped by engine."""
    found = [cell for temperature in temperatures for cell in _cells(temperature)]
    return sorted(found, key=lambda cell: ("target", "draft", "smc").index(cell.engine))


def _cells(temperature: float) -> list[Cell]:
    def smc(family: str, c: float | None = None, **asked: Any) -> Cell:
        label = family
        if "evidence_threshold" in asked:
            c = asked["evidence_threshold"]
            label = f"{family} c={c:g}"
        return Cell(label, "smc", temperature, {**SIZES, **asked}, 1, family, c)

    # `auto` and the default have thresholds too, and are measured under these names.
    mixed = [c for c in MIXED_THRESHOLDS if c != AUTO_EVIDENCE_THRESHOLD]
    weighed = [c for c in SMC_THRESHOLDS if c != EVIDENCE_THRESHOLD]
    block = {"mode": "smc", "resample_at": "block"}
    return [
        Cell(AR_TARGET, "target", temperature, family=AR_TARGET),
        Cell(AR_DRAFT, "draft", temperature, family=AR_DRAFT),
        smc(EXACT, mode="exact"),
        *(smc(MIXED, mode="mixed", evidence_threshold=c) for c in mixed),
        *(smc(SMC, **block, evidence_threshold=c) for c in weighed),
        smc(AUTO, AUTO_EVIDENCE_THRESHOLD, mode="auto"),
        smc(DEFAULT, EVIDENCE_THRESHOLD),
        smc(LATE, EVIDENCE_THRESHOLD, max_lag=LONG_LAG),
    ]
