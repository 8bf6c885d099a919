"""Log-probabilities stay with their tokens, through all that may happen to a tail."""

from typing import Any

import pytest
import torch
from toy_laws import TARGET, toy
from toy_logprobs import AskingWorker, Shown
from toy_worker import ToyRequest

from sglang_smc.options.request import OFF, Budget

CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "weighed": ({},),
    "of unlike sizes": ({}, {"num_particles": 2, "num_steps": 1}),
    "at tokens, often resampled": ({"resample_at": "token", "ess_threshold": 1.0},),
    "verified": ({"mode": "exact"}, {"mode": "auto"}),
    "weighed beside verified": ({}, {"mode": "exact"}),
    "powered, with first tokens of their own": ({"power": 2.0}, {}),
}
RUNGS = {
    "as asked": (None,),
    "more and fewer": (Budget(3, 2), Budget(2, 1), Budget(1, 2), OFF, Budget(3, 1)),
}
SHOWN: tuple[Shown, ...] = ((3, [0, 2]), (0, None), (1, None), None, (0, [1]))


@pytest.mark.parametrize("budgets", list(RUNGS))
@pytest.mark.parametrize("name", list(CHOICES))
def test_each_token_has_what_the_target_says_of_it_in_its_place(name: str, budgets: str) -> None:
    server = {"num_particles": 3, "num_steps": 2, "max_lag": 5, "evidence_threshold": 0.0}
    own = {"chosen": CHOICES[name], "budgets": RUNGS[budgets], "shown": SHOWN}
    worker = toy(40, limit=14, kind=AskingWorker, **server, **own)
    worker.run(list(range(1, 41)))
    assert len({len(req.output_ids) for req in worker.begun}) > 1
    for req in worker.begun:
        check(req)


def check(req: ToyRequest) -> None:
    """The books of one request against the target's table."""
    if not req.return_logprob:
        assert not req.logprob.output_token_logprobs_val
        return
    text = req.output_ids
    books = req.logprob
    expected = torch.stack(
        [torch.log_softmax(TARGET.after(tuple(text[:place])), -1) for place in range(len(text))]
    )
    own = expected.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
    assert books.output_token_logprobs_idx == text
    assert books.output_token_logprobs_val == pytest.approx(own.tolist(), abs=1e-5)
    num_top = books.top_logprobs_num
    ids = books.token_ids_logprob
    if num_top:
        top = expected.topk(num_top)
        torch.testing.assert_close(torch.tensor(books.output_top_logprobs_val), top.values)
        assert books.output_top_logprobs_idx == top.indices.tolist()
    if ids is not None:
        assert books.output_token_ids_logprobs_idx == [ids] * len(text)
        listed = torch.tensor(books.output_token_ids_logprobs_val)
        torch.testing.assert_close(listed, expected[:, ids])
