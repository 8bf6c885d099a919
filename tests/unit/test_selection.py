"""How near the rule that selects one of several siblings is to the best.

That it is exact, with any bins, is in `test_exact`.
"""

import pytest
import torch

from sglang_smc.smc import verification
from sglang_smc.smc.verification import selection_rule


def random_targets(seed: int, size: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets ``[size, V]`` of masses up to 1, half of them 1, and drafts of mass 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, size, num_tokens, generator=generator, dtype=torch.float64)
    p, q = torch.softmax(2 * logits, -1)
    q[:, 0] = 0  # a token that is never drafted
    mass = torch.rand(size, generator=generator, dtype=torch.float64)
    mass[::2] = 1
    return mass.unsqueeze(1) * p, q / q.sum(1, keepdim=True)


def law_of_tokens(target: torch.Tensor, draft: torch.Tensor, num_siblings: int) -> torch.Tensor:
    """The law ``[size, V]`` of a rule with a bin for each token: the finest there is."""
    ratio, order = (target / draft).sort(1)
    masses = (of.gather(1, order) for of in (target, draft))
    of_groups = torch.full((len(target),), num_siblings)
    rule = selection_rule(ratio, *masses, of_groups, num_siblings + 1)
    return rule.density.gather(1, order.argsort(1)) * draft


def best(target: torch.Tensor, draft: torch.Tensor, num_siblings: int) -> torch.Tensor:
    """What optimal transport accepts of the target, ``[size]``."""
    order = (target / draft).argsort(1)
    forced, taken = (of.gather(1, order).cumsum(1) for of in (draft, target))
    return 1 - (forced**num_siblings - taken).amax(1).clamp_min(0)


def law_of_bins(target: torch.Tensor, draft: torch.Tensor, num_siblings: int) -> torch.Tensor:
    """The law that `exact` selects by, ``[size, V]``."""
    size, none = len(target), torch.zeros(len(target), dtype=torch.int64)
    chains = verification.Chains(*(none.view(-1, 1, 1).expand(-1, num_siblings, 1),) * 3, none)
    mass = target.sum(1)
    walk = verification.begin_walk(chains, torch.full((size,), num_siblings), 1)._replace(
        chance=mass
    )
    return verification._fork(walk, (target / mass.unsqueeze(1)).log(), draft.log()).law


@pytest.mark.parametrize("num_siblings", [1, 2, 4, 8])
def test_the_selection_is_near_the_best(num_siblings: int) -> None:
    """Against the bound of optimal transport, and against SpecInfer's one after another."""
    target, q = random_targets(2, 300, 64)
    law = law_of_bins(target, q, num_siblings)
    assert torch.allclose(law.sum(1), torch.ones(300).double())
    accepted = torch.minimum(target, law).sum(1)
    bound = best(target, q, num_siblings)
    assert (accepted <= bound + 1e-9).all()
    assert (bound - accepted).mean() < 0.01
    left, rejected = target, torch.ones(300).double()
    for _ in range(num_siblings):
        taken_now = torch.minimum(left, q).sum(1)
        left = (left - q).clamp_min(0) / (1 - taken_now).unsqueeze(1)
        rejected = rejected * (1 - taken_now)
    gain = (accepted - (1 - rejected)).mean()
    assert gain > 0.005 if num_siblings > 1 else gain.abs() < 1e-9


@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_bins_lose_next_to_nothing(noise: float) -> None:
    """Against a bin for each token: 0.001 of the target at most, where 0.6 to 0.7 are accepted.

    A draft like the target, and one that has little to do with it.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40, 2000, generator=generator, dtype=torch.float64)
    q = torch.softmax(logits + noise * torch.randn(logits.shape, generator=generator), 1)
    mass = torch.linspace(0.1, 1.0, 40, dtype=torch.float64).sqrt().unsqueeze(1)
    target = mass * torch.softmax(logits, 1)
    for num_siblings in (2, 8):
        of_bins = law_of_bins(target, q, num_siblings)
        of_tokens = law_of_tokens(target, q, num_siblings)
        accepted, finest = (torch.minimum(target, law).sum(1) for law in (of_bins, of_tokens))
        assert (finest - accepted).mean() < 0.0012


def test_laws_in_single_precision_are_laws() -> None:
    """What decides is consistent: the law has mass 1 by the q that tokens are drawn from."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50_000, generator=generator) * 3
    log_p, log_q = logits.log_softmax(1), (logits + torch.randn(logits.shape, generator=generator))
    walk_law = law_of_bins(log_p.exp(), log_q.softmax(1), 8)
    assert walk_law.dtype == torch.float32
    assert (walk_law.double().sum(1) - 1).abs().max() < 1e-6
