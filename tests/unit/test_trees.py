"""Trees of likely tokens, against seats that are given one after another."""

import pytest
import torch

from sglang_smc.smc.trees import branch


def seats(q: list[float], num_chains: int) -> list[int]:
    """Return the tokens of so many chains, each given to the largest quotient q / (1 + seats)."""
    given: list[int] = []
    for _ in range(num_chains):
        given.append(max(range(len(q)), key=lambda token: q[token] / (1 + given.count(token))))
    return sorted(given)


@pytest.mark.parametrize(("num_chains", "vocab_size"), [(1, 5), (4, 3), (6, 40)])
def test_chains_of_one_text_divide_its_likeliest_tokens(num_chains: int, vocab_size: int) -> None:
    """Red if a token has a chain too many or too few, or texts share chains."""
    make = torch.Generator().manual_seed(7)
    for _ in range(50):
        text = torch.randint(0, 3, (num_chains,), generator=make)
        logits = 2.0 * torch.randn(3, vocab_size, generator=make, dtype=torch.float64)
        logits[:, 1] = -torch.inf
        same_text = (text.unsqueeze(0) == text.unsqueeze(1)).unsqueeze(0)
        tokens = branch((logits[text] + 5.0).unsqueeze(0), same_text)[0]
        for of in range(3):
            here = tokens[text == of]
            assert sorted(here.tolist()) == seats(logits[of].exp().tolist(), len(here))
