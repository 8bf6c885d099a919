"""One batch is played as two rounds, and its outcome is in the order of its requests."""

import torch

from sglang_smc.round.result import Outcome


def outcome(rows: list[int], width: int, *, is_chain: bool) -> Outcome:
    """Outcome of requests whose tokens are their rows' numbers."""
    of = torch.tensor(rows)
    tokens = of.unsqueeze(1).repeat(1, width)
    return Outcome(
        tokens=tokens,
        counts=of % 3,
        new_seq_lens=of + 10,
        last_emitted=of,
        num_correct_drafts=of,
        counters=of.unsqueeze(1).double().repeat(1, 4),
        failure=torch.zeros_like(of),
        first_tokens=None if is_chain else of,
        num_nodes=None if is_chain else of + 20,
        extras={"return_logprob": (tokens.float(), tokens.unsqueeze(2).repeat(1, 1, width))},
    )


def test_outcomes_of_two_widths_are_one_in_order() -> None:
    """Red where rows follow the rounds' order, or what one round alone has is lost."""
    parts = [outcome([1, 4], 5, is_chain=False), outcome([0, 2, 3], 2, is_chain=True)]
    found = Outcome.joined(parts, [1, 4, 0, 2, 3])
    every = list(range(5))
    assert found.last_emitted.tolist() == every and found.counters[:, 0].tolist() == every
    assert [row[0] for row in found.tokens.tolist()] == every
    assert found.tokens.shape == (5, 5) and found.tokens[0].tolist() == [0] * 5
    assert found.tokens[4].tolist() == [4] * 5 and found.tokens[3].tolist() == [3, 3, 0, 0, 0]
    assert found.first_tokens is not None and found.first_tokens.tolist() == [-1, 1, -1, -1, 4]
    assert found.num_nodes is not None and found.num_nodes.tolist() == [0, 21, 0, 0, 24]
    own, top = found.extras["return_logprob"]
    assert own.shape == (5, 5) and top.shape == (5, 5, 5) and top[2, 1].tolist() == [2, 2, 0, 0, 0]


def test_a_whole_round_is_left_as_it_is() -> None:
    part = outcome([0, 1], 2, is_chain=True)
    assert Outcome.joined([part], [0, 1]) is part
