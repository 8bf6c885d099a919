"""Define the cells of the study: pairs, shapes and temperatures."""

from __future__ import annotations

from dataclasses import dataclass

#: Targets and drafts.
PAIRS = {"draft": ("target", "draft"), "head": ("target", "eagle3"), "coder": ("1.5b", "0.5b")}
SIZES = ((8, 8), (4, 17))
TEMPERATURES = (0.3, 0.7, 1.0)


@dataclass(frozen=True)
class VerifierCell:
    """Chains of one shape and draft."""

    pair: str
    num_particles: int
    num_steps: int
    temperature: float
    draft_temperature: float

    @property
    def slug(self) -> str:
        shape = f"{self.pair}-n{self.num_particles}-k{self.num_steps}-t{self.temperature:g}"
        return f"{shape}-q{self.draft_temperature:g}"


def cells() -> list[VerifierCell]:
    """Return all cells, those of one pair together."""
    return [
        VerifierCell(pair, n, k, t, draft_t)
        for pair in PAIRS
        for t in TEMPERATURES
        for n, k in SIZES
        for draft_t in sorted({t, 0.7, 1.0, 1.2})
        if draft_t >= t
    ]
