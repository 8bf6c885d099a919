"""Define the cells: each proposal with few and many particles, exact and auto, by temperature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fidelity import grid
from fidelity.grid import AR_TARGET, AUTO, EXACT, Cell, Kind

PARTICLES = (1, 4, 8)
NUM_STEPS = 8
TARGET, STANDALONE = "target", "STANDALONE"
#: SGLang's single-chain rules, computed on the target's own answers (`chains.py`).
LIKELIEST, SAMPLED = "chain of the likeliest", "chain of samples"
#: Acceptance rules of rows. N is 1 in all but the two modes of SMC.
RULES = (EXACT, AUTO, LIKELIEST, SAMPLED, STANDALONE)


class Proposal(NamedTuple):
    """A kind of draft."""

    name: str
    folder: str | None  # of its checkpoint, beside the target; None without one
    kind: Literal["model", "eagle3", "dflash", "ngram"]
    planned: str  # the planner's name of such a draft for an 8B
    settings: Mapping[str, Any] = MappingProxyType({})  # further engine settings


WEIGHT = "speculative_smc_ngram_weight"
DRAFT = Proposal("draft model", "draft", "model", "llama-3.2-1b")
PROPOSALS = (
    DRAFT,
    Proposal("tuned draft", "tuned", "model", "llama-3.2-1b"),
    Proposal("EAGLE-3", "eagle3", "eagle3", "eagle3-8b"),
    Proposal("DFlash", "dflash", "dflash", "dflash-8b"),
    Proposal("n-gram", None, "ngram", "ngram", {WEIGHT: 1.0, "speculative_smc_mode": EXACT}),
    Proposal("model + n-gram", "draft", "ngram", "ngram+llama-3.2-1b", {WEIGHT: 0.1}),
)
_BY_NAME = {one.name: one for one in PROPOSALS}


def proposal_of(engine: str) -> Proposal | None:
    """Return the proposal of an engine; None for the target alone."""
    return _BY_NAME.get(engine.removeprefix(f"{STANDALONE} "))


def rule_of(cell: Cell) -> str:
    """Return a cell's acceptance rule, one of `RULES`, or AR for the target alone."""
    kind = cell.kind
    if kind.smc is not None:
        return kind.smc["mode"]
    return kind.family if kind.family == AR_TARGET else STANDALONE


def label(proposal: str, rule: str, num_particles: int) -> str:
    """Return a display name: ``EAGLE-3 exact N=4``."""
    return f"{proposal} {rule}" + (f" N={num_particles}" if rule in (EXACT, AUTO) else "")


def kinds() -> list[Kind]:
    """Return all settings, grouped by engine."""
    found = [Kind(AR_TARGET, TARGET)]
    for proposal in PROPOSALS:
        found += [_smc(proposal, mode, n) for mode in (EXACT, AUTO) for n in PARTICLES]
    models = [one.name for one in PROPOSALS if one.kind == "model"]
    return found + [Kind(f"{name} {STANDALONE}", f"{STANDALONE} {name}") for name in models]


def _smc(proposal: Proposal, mode: str, num_particles: int) -> Kind:
    asked = {"mode": mode, "num_particles": num_particles, "num_steps": NUM_STEPS}
    return Kind(label(proposal.name, mode, num_particles), proposal.name, asked)


def cells(temperatures: Iterable[float]) -> list[Cell]:
    """Return all cells, engine by engine."""
    return grid.cells(temperatures, kinds())
