"""A drafter of an operator's own: its law in the library's rounds, and what its flag refuses."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import laws
import pytest
import torch
from toy_laws import EOS, LENGTH, TARGET, VOCAB, P
from toy_request import PROMPT
from toy_worker import Language

from sglang_smc.models.head_kinds import drafter_named
from sglang_smc.proposers.base import DraftProposer
from sglang_smc.smc.deciding import VerifyTogether
from sglang_smc.smc.round import Round

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_RUNS = 1500
FLAG = "--speculative-smc-draft-class"


class LastToken(NamedTuple):
    """A drafter that looks at the last token, as the library's protocol has one."""

    drafter: DraftProposer

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        last = texts.gather(1, lengths.unsqueeze(1) - 1)  # [R, 1]
        return self.drafter.next_logits(0, last, cast("Any", None))[:, 0]


class Model(NamedTuple):
    language: Language

    def chain_logits(
        self, texts: torch.Tensor, lengths: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        ends = [lengths - before for before in reversed(range(num_columns))]
        return self.language.logits[
            torch.stack([self.language.contexts(texts, end) for end in ends], 1)
        ]


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return drafter_named("followers:Followers")


def test_verified_drafts_of_a_table_have_the_targets_law(followers: Any) -> None:
    """Wrong in 1 of 10,000 seeds; half of q is on one token, so that a missing correction shows."""
    rounds = Round(
        Model(TARGET),
        LastToken(followers(cast("Any", None), torch.tensor([1, 0, 0])[:VOCAB])),
        VerifyTogether(),
        num_steps=2,
        max_new_tokens=LENGTH,
        stop_tokens=(EOS,),
        evidence_threshold=torch.inf,
    )
    state = rounds.begin(torch.tensor([*PROMPT]).expand(NUM_RUNS, -1), num_particles=2)
    while not state.population.ended.all():
        state, _ = rounds.step(state, torch.arange(NUM_RUNS))
    found = state.population
    lengths = found.lengths[:, 0].tolist()
    texts = found.texts[:, 0, 1:].tolist()
    filled = [
        tuple([*text[1 : length + 1], *[EOS] * LENGTH][:LENGTH])
        for text, length in zip(texts, lengths, strict=True)
    ]
    assert laws.p_value(filled, {text: mass for text, mass in P.items() if mass > 0}) > 1e-4


def test_a_drafter_is_built_for_the_targets_tokens(
    followers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(torch.arange(4), tmp_path / "table.pt")
    monkeypatch.setenv("FOLLOWERS", str(tmp_path / "table.pt"))
    with pytest.raises(ValueError, match=r"has 4 tokens; allowed: the target's 5\. Count"):
        followers.build(SimpleNamespace(vocab_size=5))


class Unfinished(DraftProposer):
    first_logits: Callable[..., torch.Tensor] = lambda *_: torch.zeros(1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("followers", f"{FLAG} is 'followers'; allowed: package.module:Class, a subclass of "),
        ("no.such:Drafter", f"{FLAG} no.such:Drafter cannot be had: ModuleNotFoundError: "),
        ("followers:Leaders", f"{FLAG} followers:Leaders cannot be had: AttributeError: "),
        ("followers:math", "allowed: a subclass of sglang_smc.proposers.base.DraftProposer. Name "),
        (f"{__name__}:Unfinished", "is abstract; allowed: a class with build, next_logits. Define"),
    ],
)
def test_what_is_no_drafter_is_refused(followers: Any, given: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        drafter_named(given)
    assert told in str(error.value)
