"""The servers under audit: their faults, and the table of what is found."""

from types import SimpleNamespace
from typing import Any

import torch
from audit.faults.audit_faults import OWN, STOCK, accept
from audit.run import SERVERS, row_of
from laws import sampling

from sglang_smc.patches.cpu import speculation
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.verification import Verified

NODES = 60
FLAT = torch.tensor([[0.3, 0.2, 0.1, 0.0]]).repeat(NODES, 1)  # logits


def tokens_of(fault: str, logits: torch.Tensor = FLAT, **limits: Any) -> list[int]:
    """Sample the target's tokens at the nodes of one chain, with a fault."""
    torch.manual_seed(0)
    tokens = STOCK[fault](
        speculation.sample_target,
        None,
        next_token_logits=logits,
        sampling_info=sampling(1, **limits),
        batch_size=1,
        verify_width=len(logits),
        max_top_k=None,
    )
    return tokens[0].tolist()


def test_each_fault_is_audited() -> None:
    assert {server.fault for server in SERVERS} == {"", *STOCK, *OWN}


def test_faults_change_what_is_sampled() -> None:
    assert set(tokens_of("greedy")) == {0}
    assert len(set(tokens_of("temperature", temperatures=1e-3))) > 1
    assert len(set(tokens_of("filters", top_ks=1))) > 1
    assert tokens_of("bonus")[-1] == 0 != max(tokens_of("bonus"))


def test_the_likely_fault_accepts_likely_drafts() -> None:
    """Of drafts 2 and 3 it accepts the one with probability 0.3 or more."""
    logits = torch.log(torch.tensor([[0.3, 0.2, 0.5, 0.0], [0.4, 0.3, 0.2, 0.1], [1.0, 0, 0, 0]]))
    tokens_of("likely", logits)
    predicted = torch.zeros(1, 3, dtype=torch.long)
    how = {"candidates": torch.tensor([[9, 2, 3]]), "target_predict": predicted}
    accept(lambda original, **seen: None, None, **how)
    assert predicted.tolist() == [[2, 0, 0]]


def test_faults_of_smc_change_what_is_accepted() -> None:
    found = Verified(*torch.ones(5, 2).bool())
    assert not OWN["residual"](lambda *_: found).rejects.any()
    law = TokenDistribution(FLAT, torch.full((1,), 0.5), sums=object())
    drafts = SimpleNamespace(_replace=SimpleNamespace, q=[law])
    (q,) = OWN["ratio"](lambda batch, drafts: drafts.q, None, drafts)
    assert q.temperature.tolist() == [1.0] and q.sums is None


def test_likeliest_drafts_leave_the_targets_samples_alone() -> None:
    class Law(TokenDistribution):
        pass

    OWN["argmax"](Law)
    uniforms = torch.linspace(0, 0.99, NODES, dtype=torch.float64)
    law = Law(FLAT, torch.ones(1))
    assert set(law.sample(uniforms)[0].tolist()) == {0}
    assert set(law.draw(uniforms).tolist()) == {0, 1, 2, 3}
    assert law.sample(uniforms)[1].allclose(torch.log_softmax(FLAT, 1)[:, 0])


def test_a_row_names_what_failed() -> None:
    sampled = {"check": "sampled", "verdict": "fail", "estimate": 0.05, "standard_error": 0.01}
    told = {
        "name": "EAGLE",
        "is_lossless": False,
        "audits": [{"passed": False, "results": [sampled]}],
    }
    assert row_of(told) == ["EAGLE", "no", "1 of 1", "sampled", "+0.050 ± 0.020"]
