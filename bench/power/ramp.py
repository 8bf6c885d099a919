"""Measure a ramp of alpha over the first letters of `power.toy`, without drafts or SMC's rounds.

    PYTHONPATH=bench .venv/bin/python -m power.ramp       # a minute

Particles are drawn from p^a, renormalised at each letter, and weighed for p^a of the whole text so
far, where a rises from 1 to alpha. Its weights telescope, so that the last target is p^alpha.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from intervals import Z95
from power.toy import LENGTH, ORDER, StateModel, letters
from results import markdown_table
from study import PUBLISHED

from sglang_smc.smc import weighing

NUM_RUNS = 2000
BLOCK = 4  # letters between resamplings


class Ramp(NamedTuple):
    """Over how many letters alpha rises, 0 for none; and whether the proposal follows it."""

    letters: int
    proposes: bool

    def at(self, place: int, power: float) -> float:
        """Return the exponent of texts of ``place`` letters."""
        return power if place >= self.letters else 1 + (power - 1) * place / self.letters


RAMPS = (Ramp(0, False), Ramp(12, True), Ramp(24, True), Ramp(40, True), Ramp(24, False))


def log_evidence(model: StateModel, power: float, num_particles: int, ramp: Ramp) -> torch.Tensor:
    """Return log Z-hat of all runs, ``[R]``."""
    generator = torch.Generator().manual_seed(1)
    log_probs = model.log_probs.double()
    shape = (NUM_RUNS, num_particles)
    states = torch.full(shape, model.start)
    log_p = torch.zeros(shape, dtype=torch.float64)
    weights = torch.zeros_like(log_p)
    everyone = torch.ones(shape, dtype=torch.bool)
    systematic = torch.full((NUM_RUNS,), weighing.SCHEMES.index("systematic"))
    total = torch.zeros(NUM_RUNS, dtype=torch.float64)
    for place in range(LENGTH):
        proposed = ramp.at(place + 1, power) if ramp.proposes else power
        law = (proposed * log_probs).log_softmax(1)
        drawn = torch.multinomial(law[states].exp().flatten(0, 1), 1, generator=generator)
        tokens = drawn.view(shape)
        before = ramp.at(place, power) * log_p
        log_p = log_p + log_probs[states, tokens]
        weights = weights + ramp.at(place + 1, power) * log_p - before - law[states, tokens]
        states = model.moves[states, tokens]
        if (place + 1) % BLOCK == 0:
            low = weighing.effective_sample_size(weights) < num_particles / 2
            uniforms = torch.rand(shape, generator=generator, dtype=torch.float64)
            ancestors, weights, gained = weighing.resample(
                weights, low, everyone, uniforms, systematic
            )
            total += gained
            states = states.gather(1, ancestors)
            log_p = log_p.gather(1, ancestors)
    return total + weighing.log_mean_exp(weights, everyone.sum(1))


def main() -> None:
    model = letters(ORDER)
    half = Z95 / math.sqrt(NUM_RUNS)
    lines = []
    for power in (2.0, 4.0):
        exact = model.log_normalizer(power, LENGTH)
        for ramp in RAMPS:
            errors = log_evidence(model, power, 8, ramp) - exact
            squares = (errors - errors.mean()) ** 2
            way = f"{ramp.letters} letters" + (", its proposal too" if ramp.proposes else "")
            lines.append(
                [
                    f"alpha {power:g}, {way if ramp.letters else 'no ramp'}",
                    f"{squares.mean():.2f} ± {half * squares.std():.2f}",
                    f"{-errors.mean():.2f} ± {half * errors.std():.2f}",
                ]
            )
    title = f"A ramp of alpha, N = 8, {NUM_RUNS} runs a line, ± half of the 95 % interval.\n\n"
    page = title + markdown_table(["", "variance of log Ẑ", "log Z less E log Ẑ"], lines) + "\n"
    (PUBLISHED / "power").mkdir(exist_ok=True)
    (PUBLISHED / "power" / "toy_ramp.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
