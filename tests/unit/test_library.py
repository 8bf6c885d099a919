"""Rounds of the library over two plain models are those of a server."""

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from toy_laws import EOS, PAIR, toy
from toy_request import PROMPT
from toy_worker import Language

from sglang_smc.smc.deciding import Decider, VerifyEach, VerifyTogether, Weigh
from sglang_smc.smc.round import Round
from sglang_smc.state.metrics import fidelity_of

LENGTH, SIZE, N = 12, 40, 4
SERVER: dict[str, Any] = {"num_particles": N, "num_steps": 3, "max_lag": LENGTH + 8}
VERIFIED, POWERED = {"proposal": "verified", "power": 2.0}, {"power": 2.0, "draft_temperature": 0.5}
CASES: dict[str, tuple[Decider, dict[str, Any], dict[str, Any]]] = {
    "smc": (Weigh(), {}, {}),
    "blocks": (Weigh(), {"evidence_threshold": 0.0}, {"evidence_threshold": 0.0}),
    "powers": (Weigh(), {"power": 2.0}, {"power": 2.0, "evidence_threshold": 0.0}),
    "at each token": (
        Weigh(),
        {"resample_at": "token", "resampling_method": "multinomial", "ess_threshold": 0.9},
        {"resample_each_token": True, "scheme": "multinomial", "ess_threshold": 0.9},
    ),
    "exact": (VerifyTogether(), {"mode": "exact"}, {"evidence_threshold": torch.inf}),
    "auto": (VerifyTogether(), {"mode": "auto", "evidence_threshold": 0.5}, {}),
    "verified": (VerifyEach(), VERIFIED, POWERED),
}


class Model(NamedTuple):
    """A toy language as both protocols have it."""

    language: Language

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.chain_logits(texts, lengths, 1)[:, 0]

    def chain_logits(
        self, texts: torch.Tensor, lengths: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        ends = [lengths - before for before in reversed(range(num_columns))]
        contexts = [self.language.contexts(texts, end) for end in ends]
        return self.language.logits[torch.stack(contexts, 1)]


@pytest.mark.parametrize("name", list(CASES))
def test_a_text_of_the_library_is_the_servers(name: str) -> None:
    """From its particles after prefill, which have first tokens of their own under a power."""
    decider, server, options = CASES[name]
    own = toy(SIZE, limit=LENGTH, **SERVER | server)
    reqs, rows = own.begin(list(range(1, SIZE + 1))), torch.arange(1, 1 + SIZE)
    tables = own.worker._tables
    seeds, begun = tables.requests.gather(rows).seeds, tables.particles.gather(rows, N, LENGTH)[0]
    rounds = Round(
        *map(Model, PAIR),
        decider,
        num_steps=3,
        max_new_tokens=LENGTH,
        stop_tokens=(EOS,),
        **options,
    )
    state = rounds.begin(torch.tensor([*PROMPT, 0]).expand(SIZE, -1), N, num_emitted=1)
    first = begun.last_emitted
    state.population.texts[:, :, 1] = first
    begins = {"ended": begun.ended | (first == EOS), "log_evidence": begun.log_evidence}
    state = state._replace(population=state.population._replace(**begins))
    while not state.population.ended.all():
        state, _ = rounds.step(state, seeds)
    while running := [req for req in reqs if not own._is_over(req)]:
        own.step(running)
    found = state.population
    lengths, texts = found.lengths[:, 0].tolist(), found.texts[:, 0, 1:].tolist()
    drawn = [text[: length + 1] for text, length in zip(texts, lengths, strict=True)]
    assert drawn == [req.output_ids for req in reqs]
    if decider.weighs:  # the others have no weights
        counters = own.tensor([req.smc_state.counters for req in reqs], torch.float64)
        torch.testing.assert_close(found.log_evidence, counters[:, -1])
        torch.testing.assert_close(found.fidelity[:, 0], fidelity_of(counters))
    assert len({tuple(text) for text in drawn}) >= 10


NAN = Model(Language(PAIR[0].logits * torch.nan))


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"scheme": "residual"}, {"target": NAN}])
def test_a_mistake_names_what_is_allowed(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        rounds = Round(**{"target": Model(PAIR[0]), "proposer": Model(PAIR[1])} | wrong)
        rounds.step(rounds.begin(torch.tensor([PROMPT]), N), torch.tensor([1]))


def test_the_library_needs_torch_alone() -> None:
    """So that its import takes little more than torch's."""
    told = "import sglang_smc.smc.round, sys; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", told], text=True).split()
    slow = {"sglang", "transformers", "triton", "torch._dynamo", "scipy"}
    assert slow.isdisjoint(modules)
