"""Exact verification, kernel against reference: masses, rule, residual, and where a walk goes."""

import math
from unittest import mock

import pytest
import torch
from drawn import Case, copied, drawn
from exact_tables import verify

from sglang_smc.kernels import verify as kernel
from sglang_smc.kernels.verify import selection_rule
from sglang_smc.ops.interface import Ops
from sglang_smc.smc import verification
from sglang_smc.smc.verification import NUM_BINS, Chains, Walk, middle_ratios
from sglang_smc.smc.verification import selection_rule as expected_rule


def laws(c: Case, size: int) -> torch.Tensor:
    """Log-probabilities of p and of a draft near it, some tokens forbidden: ``[2, size, V]``."""
    p = c.normal(size, c.vocab_size) * 2
    both = torch.stack([p, p + c.normal(size, c.vocab_size) * c.spread])
    banned = c.flags(0.1, *both.shape)
    banned[..., 0] = False
    return both.masked_fill(banned, -torch.inf).log_softmax(-1)


def a_walk(c: Case, size: int) -> Walk:
    """Somewhere on the way, wherever it may be; some groups have arrived. Room for kernels."""
    group = torch.arange(size)
    follows = c.flags(0.6, size, c.max_chains)
    follows[group, c.whole(0, c.max_chains, size)] = True
    chance = c.uniforms(size)
    chance[::2] = 1.0
    return Walk(
        follows=follows,
        chance=chance,
        walking=c.flags(0.8, size),
        p_row=group,
        q_row=group * c.max_chains + follows.long().argmax(1),
        found=verification.Verified(
            num_columns=torch.zeros_like(group),
            winner=torch.zeros_like(group),
            rejects=c.flags(0.5, size),
            left=group + size * (group % 2),
            residuals=c.uniforms(2 * size, c.vocab_size).float(),
        ),
    )


@drawn(
    9, step=[0, 1, 2], max_chains=[1, 2, 5, 8], vocab_size=[2, 5, 64, 700], spread=[0.0, 0.3, 2.0]
)
def test_a_column(c: Case, device: str) -> None:
    """From any state of the walk. What does not exist holds anything, and spoils nothing."""
    shape = size, max_chains, _ = 12, c.max_chains, 3
    walk, step = a_walk(c, size), c.step
    log_p, log_q = laws(c, size)
    drawn = torch.multinomial(log_q.exp(), max_chains, replacement=True, generator=c.generator)
    tokens = drawn.unsqueeze(2).expand(shape).clone()
    num_steps = c.whole(step + 1, shape[2] + 1, size)
    uniforms, ends = c.uniforms(*shape), c.flags(0.2, *shape)
    tokens[~walk.follows] = 10**9
    uniforms[walk.follows.sum(1) == 1, 1:] = math.nan
    log_p[~walk.walking] = log_q[~walk.walking] = math.nan
    chains = Chains(tokens, ends, uniforms, num_steps)
    residuals = walk.found.residuals[walk.found.left]
    own = walk._replace(found=walk.found._replace(left=torch.arange(size), residuals=residuals))
    expected = verification.walk_on(own, chains, log_p, log_q, step)
    with mock.patch.multiple(kernel, _BIN_TILE=128, _BIN_CHUNK=32, _TILE=256):
        there = copied([chains, log_p, log_q], device)
        found = copied(kernel.walk_on(copied(walk, device), *there, step), "cpu")
        with pytest.raises(ValueError, match="must be 1"):
            chains, p, q = there
            kernel.walk_on(copied(walk, device), chains, p.t(), q.t(), step)
    was, goes = walk.walking, expected.walking
    assert torch.equal(found.walking, goes)
    for name in ("follows", "p_row", "q_row"):
        assert torch.equal(getattr(found, name)[goes], getattr(expected, name)[goes]), name
    assert torch.allclose(found.chance[was], expected.chance[was], rtol=1e-5, atol=1e-7)
    assert torch.equal(found.follows[~was], walk.follows[~was]), "written where nothing walks"
    for name in ("num_columns", "winner", "rejects"):
        assert torch.equal(getattr(found.found, name), getattr(expected.found, name)), name
    left, uses = found.found.residuals[found.found.left], expected.found.rejects
    assert torch.allclose(left[uses], expected.found.residuals[uses], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_siblings", [1, 2, 8])
def test_the_rule_of_given_masses(num_siblings: int, device: str) -> None:
    """Masses in many tiles, empty bins among them, in one bin, and of a path with any chance."""
    c, size = Case(seed=num_siblings), 16
    masses = c.uniforms(size, 70, 2, NUM_BINS).float()
    masses[:, :, 0] *= middle_ratios(torch.device("cpu")).float()
    few = c.flags(0.3, size, 1, 1, NUM_BINS)
    few[0], few[0, ..., 64] = False, True
    masses = masses * few
    masses = masses / masses.sum((1, 3), keepdim=True)
    chance = c.uniforms(size)
    chance[:4] = 1.0
    follows = (torch.arange(9) < num_siblings).expand(size, -1).contiguous()
    walking = torch.arange(size) != 5
    arguments = copied([walking, chance, follows, masses], device)
    levels, density, reached = (part.cpu()[walking] for part in selection_rule(*arguments))
    p_masses, q_masses = masses.double().sum(1).unbind(1)
    target = p_masses * (chance / p_masses.sum(1)).unsqueeze(1)
    draft = q_masses / q_masses.sum(1, keepdim=True)
    middle = middle_ratios(target.device)
    ratio = torch.where(draft > 0, target / draft, middle)
    expected = expected_rule(ratio, target, draft, follows.sum(1), 9)
    assert torch.equal(levels.long(), expected.levels[walking])
    assert torch.allclose(density.double(), expected.density[walking], rtol=1e-6)
    sums = (density.double() * draft[walking]).sum(1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-6), "laws of what is selected"
    assert torch.allclose(reached.double(), chance[walking], rtol=1e-6)


def test_a_broken_row_spoils_no_other(device: str, kernels: Ops) -> None:
    """Rows of NaN, as of a model that overflows: some token, some column, and nothing worse."""
    c = Case(seed=1, vocab_size=50, spread=1.0)
    log_p, log_q = laws(c, 6 * 3).unflatten(1, (6, 1, 3))
    log_p, log_q = (of.expand(-1, 4, -1, -1).clone() for of in (log_p, log_q[:, :, :2]))
    tokens, uniforms = c.whole(0, 50, 6, 4, 2), c.uniforms(6, 4, 2)
    arguments = [tokens, torch.zeros_like(tokens).bool(), log_p, log_q, uniforms]
    whole = verify(*copied(arguments, device), walker=kernels)
    log_p[1], log_q[3] = math.nan, math.nan
    broken = verify(*copied(arguments, device), walker=kernels)
    others = torch.tensor([0, 2, 4, 5], device=device)
    for mine, before in zip(broken, whole, strict=True):
        assert torch.equal(mine[others], before[others])
    assert (broken.num_columns <= 2).all() and (broken.winner < 4).all()
