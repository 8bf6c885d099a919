"""Rounds of the library over two plain models are those of a server."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from toy_laws import EOS, PAIR, toy
from toy_request import PROMPT
from toy_worker import Language

from sglang_smc.library import load
from sglang_smc.smc.deciding import Decider, VerifyEach, VerifyTogether, Weigh
from sglang_smc.smc.round import Round
from sglang_smc.state.metrics import fidelity_of

MODELS = Path(__file__).resolve().parents[2] / "bench" / "pair"
LENGTH = 12
SIZE = 40
N = 4
SERVER: dict[str, Any] = {"num_particles": N, "num_steps": 3, "max_lag": LENGTH + 8}
VERIFIED = {"power": 2.0}
POWERED = {"power": 2.0, "draft_temperature": 0.5}
CASES: dict[str, tuple[Decider, dict[str, Any], dict[str, Any]]] = {
    "smc": (Weigh(), {}, {}),
    "blocks": (Weigh(), {"evidence_threshold": 0.0}, {"evidence_threshold": 0.0}),
    "powers": (
        Weigh(),
        {"power": 2.0, "proposal": "draft"},
        {"power": 2.0, "evidence_threshold": 0.0},
    ),
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
    reqs = own.begin(list(range(1, SIZE + 1)))
    rows = torch.arange(1, 1 + SIZE)
    tables = own.worker._tables
    seeds = tables.requests.gather(rows).seeds
    begun = tables.particles.gather(rows, N, LENGTH)[0]
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
    lengths = found.lengths[:, 0].tolist()
    texts = found.texts[:, 0, 1:].tolist()
    drawn = [text[: length + 1] for text, length in zip(texts, lengths, strict=True)]
    assert drawn == [req.output_ids for req in reqs]
    if decider.weighs:  # the others have no weights
        counters = own.tensor([req.smc_state.counters for req in reqs], torch.float64)
        torch.testing.assert_close(found.log_evidence, counters[:, -1])
        torch.testing.assert_close(found.fidelity[:, 0], fidelity_of(counters))
    assert len({tuple(text) for text in drawn}) >= 10


@pytest.mark.parametrize("name", ["smc", "powers", "exact"])
def test_one_call_is_its_rounds(name: str) -> None:
    """Its draw, log Z and number of rounds are those of `step`; its weights those before the draw.

    The drawn particle's share of weight is its chance to be drawn.
    """
    decider, _, options = CASES[name]
    rounds = Round(*map(Model, PAIR), decider, num_steps=3, stop_tokens=(EOS,), **options)
    drawn = weights = 0.0
    for seed in range(60):
        answer = rounds.run(torch.tensor([*PROMPT, 0]), N, seed)
        assert len(answer.tokens) == N and float(answer.weights.sum()) == pytest.approx(1)
        heaviest = int(answer.weights.argmax())
        drawn += answer.drawn == heaviest
        weights += float(answer.weights[heaviest])
        if seed >= 10:
            continue
        state = rounds.begin(torch.tensor([[*PROMPT, 0]]), N)
        num_rounds = 0
        ess = []
        while not state.population.ended.all():
            state, decision = rounds.step(state, torch.tensor([seed]))
            num_rounds += 1
            ess.append(float(decision.ess))
        found = state.population
        text = found.tokens[0, 0, : int(found.lengths[0, 0])].tolist()
        assert answer.tokens[answer.drawn] == text
        assert answer.log_evidence == float(found.log_evidence)
        assert (answer.num_rounds, answer.ess) == (num_rounds, ess)
    if decider.weighs:  # within four standard errors, else a run in 16,000 is red
        assert abs(drawn - weights) < 4 * (60 * 0.25) ** 0.5 and weights > 1.2 * 60 / N


class Letters:
    """A tokenizer of a letter a token."""

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in prompt]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token + ord("a")) for token in tokens)


def test_texts_weights_and_a_table_of_a_prompt() -> None:
    rounds = Round(*map(Model, PAIR), num_steps=3, stop_tokens=(EOS,), tokenizer=Letters())
    answer = rounds.run("ab<"[:2], N, seed=3)
    assert answer.texts == [Letters().decode(tokens) for tokens in answer.tokens]
    assert answer.text == answer.texts[answer.drawn]
    assert answer.tokens_per_pass == len(answer.tokens[answer.drawn]) / answer.num_rounds
    table = answer._repr_html_()
    order = [table.index(f"{weight:.3f}") for weight in answer.weights.sort(descending=True)[0]]
    assert order == sorted(order) and table.count("<tr>") == 1 + N
    with pytest.raises(ValueError, match="allowed: two or more"):
        rounds.run("a", N)


def test_two_models_of_a_folder_in_one_call() -> None:
    """A chat goes through the target's template; drafts of another vocabulary are refused."""
    rounds = load(MODELS / "target", MODELS / "draft", decider=VerifyTogether(), max_new_tokens=8)
    answer = rounds.run([{"role": "user", "content": "Sam has 12 caps."}], num_particles=2, seed=1)
    assert answer.text.strip() and len(answer.tokens[0]) <= 8
    assert answer == rounds.run([{"role": "user", "content": "Sam has 12 caps."}], 2, 1)._replace(
        weights=answer.weights
    )


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
