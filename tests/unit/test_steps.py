"""The weight of a text counts its tokens up to its end, and none behind it."""

from types import SimpleNamespace

import torch

from sglang_smc.config import SMCConfig
from sglang_smc.particles import Population
from sglang_smc.sampling import RequestSpec, RequestTable
from sglang_smc.steps import Drafts, Groups, Steps

EOS, VOCAB = 2, 4


def groups() -> Groups:
    table = RequestTable(2, VOCAB, "cpu")
    table.write([RequestSpec(1, 7, 1.0, VOCAB, 1.0, 0.0, 100, 0, False, frozenset({EOS}))])
    params = SimpleNamespace(stop_strs=[], stop_regex_strs=[])
    nothing = torch.zeros(1, dtype=torch.int64)
    return Groups(
        reqs=[SimpleNamespace(sampling_params=params)],  # type: ignore[list-item]
        rows=torch.tensor([1]),
        settings=table.gather(torch.tensor([1])),
        filtered=False,
        committed=nothing,
        allocated=nothing,
    )


def test_weights_count_the_end_but_nothing_behind_it() -> None:
    """Ended before, ended by the second draft, never ended: 0, 2 and 3 columns of weight."""
    steps = Steps(SMCConfig(num_particles=3, num_steps=3), None, None, None)  # type: ignore[arg-type]
    before = Population(
        tokens=torch.zeros(1, 3, 10, dtype=torch.int64),
        lengths=torch.tensor([[1, 1, 1]]),
        ended=torch.tensor([[True, False, False]]),
        log_weights=torch.zeros(1, 3, dtype=torch.float64),
        anchor=torch.tensor([0]),
        num_emitted=torch.tensor([1]),
        log_evidence=torch.zeros(1, dtype=torch.float64),
    )
    drafts = Drafts(
        torch.tensor([[[0, 1, 0], [0, EOS, 1], [1, 1, 0]]]), torch.full((1, 3, 3), -1.0)
    )
    log_p = torch.tensor([-0.9, -0.99, -0.999, 5.0]).view(1, 1, 4, 1).expand(1, 3, 4, VOCAB)
    cut, after = steps.reweight(groups(), before, drafts, log_p)
    expected = torch.tensor([[0.0, 0.1 + 0.01, 0.1 + 0.01 + 0.001]], dtype=torch.float64)
    assert torch.allclose(cut.log_weights, expected, atol=1e-6)
    assert torch.equal(after.log_weights, cut.log_weights)
    assert after.lengths.tolist() == [[1, 3, 4]]
    assert after.ended.tolist() == [[True, True, False]]
