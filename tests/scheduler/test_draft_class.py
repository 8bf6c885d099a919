"""A drafter of an operator's own, named by the flag, in SGLang's scheduler.

Texts and evidence are those of the same drafter in rounds over transformers: whatever a server does
to it beyond calling it, or a token that it is not given, changes them.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from checkpoint_rounds import CheckpointRounds, check
from in_process import SMC, Server
from tiny_models import smc_arguments

from sglang_smc.models.chains import Chains
from sglang_smc.proposers.ngram import UniformDraft

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = {"num_particles": 3, "num_steps": 3, "max_lag": 16}
PROMPTS = [[5 + seed, *range(2, 2 + 3 * seed)] for seed in range(2 * len(SMC))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "custom_params": {"smc": {"mode": "exact"}}}


def sampled(seed: int) -> dict[str, Any]:
    mode = {"smc": SMC[seed % len(SMC)]}
    return {"temperature": 1.0, "max_new_tokens": 12, "sampling_seed": seed, "custom_params": mode}


def played(server: Server, params: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sent = [
        {"input_ids": prompt, "sampling_params": own}
        for prompt, own in zip(PROMPTS, params, strict=True)
    ]
    none = dict.fromkeys(("spec_smc_log_evidence", "spec_smc_watched_ct"))
    replies = server.play(sent, every=0)
    return [{"output_ids": one.output_ids, "meta_info": none | one.meta} for one in replies]


def test_a_class_of_one_file_drafts(
    start: Callable[..., Server],
    tiny: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("FOLLOWERS", str(tmp_path / "table.pt"))
    target = tiny(seed=1, vocab_size=64, scale=0.3)
    own = CheckpointRounds(target, None, SETTINGS, 2 * len(PROMPTS))
    ids = torch.arange(own.vocab_size).unsqueeze(1)
    followers = own.models[0].logits(ids, torch.zeros_like(ids))[:, 0].argmax(1)
    torch.save(followers, tmp_path / "table.pt")
    arguments = smc_arguments(target, "", draft_class="followers:Followers", **SETTINGS)
    server = start(**{**arguments, "speculative_draft_model_path": None})

    drafter = sys.modules["followers"].Followers(cast("Any", None), followers)
    own.worker._round.draft = own.prefill._draft = own.worker._prefill._draft = drafter
    params = [sampled(seed) for seed in range(len(PROMPTS))]
    answers = played(server, params)
    assert check(answers, own.generate(PROMPTS, params)) == len(PROMPTS)

    greedy = played(server, [GREEDY] * len(PROMPTS))
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        text = list(prompt)
        for _ in answer["output_ids"]:
            whole = torch.tensor([text])
            text.append(int(own.models[0].logits(whole, torch.tensor([[len(text) - 1]])).argmax()))
        assert answer["output_ids"] == text[len(prompt) :]
    rounds = sum(answer["meta_info"]["spec_smc_rounds_ct"] for answer in greedy)
    assert rounds < sum(len(answer["output_ids"]) for answer in greedy) - len(greedy)


class Watching(UniformDraft):
    """Takes the target's states, without a model of its own."""

    wants_states = True
    seen: ClassVar[list[tuple[torch.Size, torch.Size]]] = []

    def read_chains(self, chains: Chains, states: torch.Tensor) -> None:
        self.seen.append((chains.tokens.shape, states.shape))


def test_a_class_without_a_model_is_given_states(
    start: Callable[..., Server], tiny: Callable[..., str]
) -> None:
    target = tiny(seed=1, vocab_size=64, scale=0.3)
    arguments = smc_arguments(target, "", draft_class=f"{__name__}:Watching", **SETTINGS)
    server = start(**{**arguments, "speculative_draft_model_path": None})
    Watching.seen.clear()  # of the rounds that a start plays
    answers = played(server, [GREEDY] * len(PROMPTS))
    assert all(answer["output_ids"] for answer in answers)
    width = json.loads((Path(target) / "config.json").read_text())["hidden_size"]
    assert Watching.seen and all(
        states == (*tokens, width) and tokens[2] == 4 for tokens, states in Watching.seen
    )
