"""Define the cells: each proposal with few and many particles, exact and auto, by temperature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from answers import COMMON
from fidelity.grid import AR_TARGET, AUTO, EXACT, SMC_ENGINE, Cell

PARTICLES = (1, 4, 8)
NUM_STEPS = 8
TARGET, STANDALONE = "target", "STANDALONE"


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
#: SGLang's own chain of K tokens: a tree with one branch; its root is the last token.
CHAIN: dict[str, Any] = {
    "speculative_algorithm": STANDALONE,
    "speculative_num_steps": NUM_STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_STEPS + 1,
}


def proposal_of(engine: str) -> Proposal | None:
    """Return the proposal of an engine; None for the target alone."""
    return _BY_NAME.get(engine.removeprefix(f"{STANDALONE} "))


def settings(engine: str) -> dict[str, Any]:
    """Return the keywords of an engine except the models."""
    proposal = proposal_of(engine)
    if engine.startswith(STANDALONE):
        return COMMON | CHAIN
    return COMMON | ({} if proposal is None else SMC_ENGINE | dict(proposal.settings))


def rule_of(cell: Cell) -> str:
    """Return a cell's acceptance rule: a mode of SMC, STANDALONE, or AR for the target alone."""
    if cell.smc is not None:
        return cell.smc["mode"]
    return cell.family or STANDALONE


def cells(temperatures: Iterable[float]) -> list[Cell]:
    """Return all cells, engine by engine."""
    every = list(temperatures)
    found = [Cell(AR_TARGET, TARGET, t, family=AR_TARGET) for t in every]
    for name in _BY_NAME:
        found += [
            _smc(name, mode, n, t) for t in every for mode in (EXACT, AUTO) for n in PARTICLES
        ]
    models = [one.name for one in PROPOSALS if one.kind == "model"]
    return found + [
        Cell(f"{name} {STANDALONE}", f"{STANDALONE} {name}", t) for name in models for t in every
    ]


def _smc(proposal: str, mode: str, num_particles: int, temperature: float) -> Cell:
    asked = {"mode": mode, "num_particles": num_particles, "num_steps": NUM_STEPS}
    return Cell(f"{proposal} {mode} N={num_particles}", proposal, temperature, asked)
