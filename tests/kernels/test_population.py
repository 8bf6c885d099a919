"""Particles on their way through a round, by kernels and by torch: tables, tokens, ancestors."""

from functools import partial
from typing import Any

import torch
from drawn import Case, assert_same, drawn

from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Population, Scores, TailLogprobs
from sglang_smc.smc.weighing import Decision

WIDTHS = (), (2,), (2,), (3,)


def drawn_population(
    c: Case, size: int, num_particles: int, width: int, longest: int
) -> Population:
    """Texts with a token changed here or there, dead, ended and absent particles."""
    shape = size, num_particles
    present = c.first_of(*shape)
    dead = c.flags(c.p_dead, *shape) | ~present
    return Population(
        texts=c.flags(1.5 / width, *shape, width).long(),
        lengths=c.whole(0, longest + 1, *shape) * present,
        ended=c.flags(c.p_ended, *shape) | ~present,
        log_weights=c.normal(*shape).double().masked_fill(dead, -torch.inf),
        num_emitted=c.whole(0, 9, size),
        log_evidence=c.uniforms(size),
        present=present,
        roots=c.whole(0, num_particles, *shape),
        unread=c.flags(0.5, size),
        fidelity=c.uniforms(*shape, len(NAMES)),
        logprobs=TailLogprobs(*(c.normal(*shape, width - 1, *more) for more in WIDTHS)),
        scores=Scores(c.uniforms(*shape), c.flags(0.8, *shape)) if c.scored else None,
    )


def parts(found: Any) -> Any:
    """All tensors, without the last place of texts, which is never part of a tail."""
    if isinstance(found, Population):
        return [found.texts[:, :, :-1], *found[1:]]
    return [parts(one) for one in found] if isinstance(found, tuple) else found


@drawn(
    24,
    num_groups=[1, 4],
    num_particles=[1, 2, 3, 8],
    width=[3, 64, 66, 150],
    num_steps=[1, 2, 9],
    p_dead=[0.0, 0.5, 1.0],
    p_ended=[0.0, 0.4, 1.0],
    scored=[False, True],
)
def test_a_round(c: Case, device: str, kernels: Ops) -> None:
    """Red where a kernel reads another particle, another row or a place behind an end."""
    size = c.num_groups
    num_particles = c.num_particles
    width = c.width
    shape = size, num_particles
    table = drawn_population(c, size + 2, num_particles + 1, width + 3, width - 3)
    table = table._replace(logprobs=None)
    own = drawn_population(c, *shape, width, width - 3)
    rows = torch.arange(size).flip(0) + 1

    def call(kind: type[Population], name: str, population: Population, *given: Any) -> Any:
        population = kind._make(population)
        return parts((getattr(population, name)(*given), *given))

    def same(name: str, *given: Any, of: Population = own) -> Any:
        by_kernel, by_torch = (
            partial(call, kind, name) for kind in (kernels.population, Population)
        )
        assert_same(by_kernel, by_torch, (of, *given), device, rounding=1e-12)

    same("gather", rows, num_particles, width, of=table)
    same("store", table, rows, c.whole(0, width, size))
    ends = c.flags(0.2, *shape, c.num_steps)
    groups = c.uniforms(size)
    decision = Decision(
        groups,
        num_kept=c.whole(0, c.num_steps + 1, *shape),
        weighed=own.log_weights,
        ess=groups,
        resampled=groups,
        all_zero=groups,
        ancestors=c.whole(0, num_particles, *shape),
        log_weights=c.normal(*shape).double(),
        log_evidence=c.uniforms(size),
        num_killed=groups,
        verified=groups,
    )
    same("extend", c.whole(0, 9, *shape, c.num_steps), ends, decision)
    failure = (c.whole(0, 3, size) - 1).clamp_min(0)
    same("append_bonus", c.whole(0, 9, *shape), ends[:, :, 0], failure)
    seeds = c.whole(-(2**40), 2**40, size)
    lag = c.whole(0, width, size)
    flags = c.flags(0.7, size), c.flags(0.3, size)
    same("narrow", seeds, lag, *flags)
    almost_equal = own.log_weights * 1e-7  # the dead stay dead
    same("narrow", seeds, lag, *flags, of=own._replace(log_weights=almost_equal))
