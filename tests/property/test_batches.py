"""Requests of one batch differ in N, K, mode and all else, and none of them notices.

A group that took a size, a threshold, a number or a slot of its neighbour draws other texts.
"""

from typing import Any, NamedTuple

import pytest
import torch
from edit_cases import Echo
from toy_grammar import Letters, maker, runners
from toy_laws import LENGTH, SCRIPTS, VOCAB, run, toy
from toy_worker import Outcome

from sglang_smc.options.request import Budget
from sglang_smc.state.texts import has_open_token


class Kind(NamedTuple):
    """What requests of one kind choose of SMC's settings, and ask SGLang for."""

    chosen: dict[str, Any]
    asked: dict[str, Any] = {}  # noqa: RUF012
    regex: str | None = None


REGEX = "abb|b(a|b)*"
PENALTIES = {"frequency_penalty": 1.2, "repetition_penalty": 1.8, "logit_bias": {"1": 0.8}}
SCORED = {"potentials": [{"name": "letters", "when": "round"}]}
KINDS = (
    Kind({}),
    Kind({"num_particles": 1, "num_steps": 1}),
    Kind({"num_particles": 3, "num_steps": 2, "resample_at": "token", "ess_threshold": 1.0}),
    Kind({"num_particles": 8, "resampling_method": "stratified", "ess_threshold": 0.9}),
    Kind({"num_particles": 5, "resampling_method": "multinomial", "selection": "argmax"}),
    Kind({"num_particles": 3, "resampling_method": "stratified", "ess_threshold": 1.0}),
    Kind({"num_particles": 3, "resampling_method": "multinomial", "evidence_threshold": 1.0}),
    Kind({"mode": "exact", "num_particles": 3}),
    Kind({"mode": "exact", "num_particles": 1, "num_steps": 2}),
    Kind({"mode": "auto", "num_steps": 2, "evidence_threshold": 0.75}),
    Kind({"mode": "auto", "num_particles": 2, "num_steps": 1}),
    Kind({"power": 2.0, "num_particles": 3, "proposal": "draft"}),
    Kind({"power": 2.0, "num_particles": 3, "num_steps": 2}),
    Kind({"power": 2.0, "num_particles": 4, "proposal": "verified"}),
    Kind({"draft_temperature": 2.0, "num_particles": 4, "evidence_threshold": 0}),
    Kind({"num_particles": 3}, PENALTIES),
    Kind({"mode": "exact"}, {"min_new_tokens": 3, "custom_logit_processor": Echo.to_str()}),
    Kind({"num_particles": 2}, {"top_p": 0.7, "min_p": 0.2}),
    Kind({"mode": "auto"}, {"top_k": 1}),
    Kind({"return_particles": True}, {"top_k": 1}),
    Kind({"num_particles": 4}, regex=REGEX),
    Kind({"num_particles": 4, "proposal": "draft"}, regex=REGEX),
    Kind({"mode": "auto", "num_particles": 3}, regex=REGEX),
    Kind({**SCORED, "num_particles": 4}),
    Kind({**SCORED, "num_particles": 6}, PENALTIES),
)
PER_KIND = 12


def serve(
    kinds: tuple[Kind, ...],
    rows: list[int] | None = None,
    *,
    max_lag: int = LENGTH,
    budgets: tuple[Budget | None, ...] = (None,),
) -> Outcome:
    """Texts of rows, each of whose kinds comes in turn."""
    makers = [maker(kind.regex) if kind.regex else (lambda: None) for kind in kinds]
    # Grammars are made as requests begin, in their order.
    begun = iter(rows or range(1, PER_KIND * len(KINDS) + 1))
    return run(
        rows=rows,
        num_runs=PER_KIND * len(KINDS),
        **{"num_particles": 8, "num_steps": 4, "max_lag": max_lag},
        chosen=tuple(kind.chosen for kind in kinds),
        asked=tuple(kind.asked for kind in kinds),
        grammar=lambda: makers[(next(begun) - 1) % len(kinds)](),
        budgets=budgets,
        runners=runners(letters=Letters()),
    )


@pytest.mark.parametrize(
    ("max_lag", "script"),
    [(1, None), (LENGTH, None), *zip((3, 1, LENGTH, 3, 1), SCRIPTS, strict=True)],
)
def test_a_text_is_the_same_among_its_own_kind_and_all(max_lag: int, script: str | None) -> None:
    more: dict[str, Any] = {"max_lag": max_lag, "budgets": SCRIPTS[script] if script else (None,)}
    assert_alike(KINDS, **more)


def test_drafts_weigh_the_same_beside_a_tree() -> None:
    """Under masks, q is renormalised where a tree's tokens are scored; one chain's q is greedy."""
    assert_alike(tuple(kind for kind in KINDS if kind.regex or "top_k" in kind.asked))


def test_texts_without_drafts_are_the_same_beside_any_others() -> None:
    chosen: dict[str, Any] = {"num_steps": 0}
    off = Kind(chosen), Kind(chosen, PENALTIES), Kind(chosen, {"top_k": 1}), Kind(chosen, {}, REGEX)
    assert_alike((*off, *KINDS[:9:4], *KINDS[-5:]))


def assert_alike(kinds: tuple[Kind, ...], **more: Any) -> None:
    """Requests of each kind have the same texts and weights among all kinds as among their own."""
    together = serve(kinds, **more)
    for i, mine in enumerate(kinds):
        rows = list(range(1 + i, PER_KIND * len(KINDS) + 1, len(kinds)))
        apart = serve((mine,), rows, **more)
        at = torch.tensor(rows) - 1
        assert torch.equal(together.outputs[at], apart.outputs), mine
        assert torch.allclose(together.log_evidence[at], apart.log_evidence, atol=1e-12), mine
        assert torch.allclose(together.fidelity[at], apart.fidelity, atol=1e-9), mine


def test_settings_matter_else_the_tests_above_would_see_nothing() -> None:
    outputs = {tuple(serve((mine,)).outputs.flatten().tolist()) for mine in KINDS}
    at_0 = sum(mine.asked.get("top_k") == 1 for mine in KINDS)  # one text, whatever the rest
    assert len(outputs) == len(KINDS) - at_0 + 1


@pytest.mark.parametrize("mode", ["smc", "exact"])
def test_a_budget_takes_no_draft_from_a_tree(mode: str) -> None:
    own = {"num_particles": 4, "num_steps": 2, "mode": mode, "asked": {"top_k": 1}, "num_runs": 40}
    assert run(**own, budgets=(Budget(4, 2),)).num_rounds == run(**own).num_rounds


def test_particles_that_end_with_tokens_of_their_own_are_an_answer() -> None:
    """Their first ones differ, and no further round follows."""
    ends = {"stop_token_ids": list(range(VOCAB))}
    worker = toy(40, num_particles=4, power=2.0, asked=ends)
    reqs = worker.begin(list(range(1, 41)))
    worker.step(reqs)
    assert not any(map(has_open_token, reqs))
