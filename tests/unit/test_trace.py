"""What a round tells for a trace: a reader who plays it by its own fields comes to the answer."""

import copy
import itertools
import json
import math
from typing import Any

import msgspec
import pytest
import torch
from toy_grammar import Letters, maker, runners
from toy_laws import EOS, languages, toy
from toy_traces import DYING, LENGTH, SERVER, Told, serve, told
from trace_replay import Replayed, read, replay

from sglang_smc.kv.transfer import each_tensor
from sglang_smc.options.request import Budget
from sglang_smc.smc.weighing import normalized
from sglang_smc_tools.view.genealogy import genealogy


@pytest.mark.parametrize("when", ["round", {"tokens": 3}, "end"])
def test_a_reader_comes_to_the_answer_of_potentials(when: Any) -> None:
    """At every lag; the last token of a text waits until its whole text has a value."""
    scored = {"trace": True, "potentials": [{"name": "letters", "when": when}]}
    choices = {}, {"max_lag": 4}, {"max_lag": 2}, {"resample_at": "token"}
    asked = ({**scored, **more} for more in choices)
    for one in serve(40, *asked, runners=runners(letters=Letters())):
        if not one.req.is_stuck:
            assert_told(one, is_plain=False)


def assert_told(one: Told, **how: bool) -> Replayed:
    found = replay(one.trace, **how)
    assert found.output_ids == one.req.output_ids
    assert one.trace.prompt_length == 2
    return found


CHOICES: list[dict[str, Any]] = [
    {},
    {"evidence_threshold": 0},
    {"resample_at": "token", "ess_threshold": 0.9},
    {"max_lag": 1},
    {"max_lag": 30, "evidence_threshold": 0},
    {"num_particles": 1},
    {"num_particles": 2, "num_steps": 1},
    {"num_steps": 0, "num_particles": 1},
    {"resampling_method": "multinomial", "ess_threshold": 1.0},
    {"mode": "exact"},
    {"mode": "exact", "num_particles": 1},
    {"mode": "auto", "num_particles": 3},
]
TRACED = [{**choice, "trace": True} for choice in CHOICES]


def test_a_reader_comes_to_the_answer() -> None:
    """All choices in one batch: a list cut to another's N or K, or to a neighbour's row, is red.

    So are ancestors of another step, weights from before or behind the one that is meant, a bonus
    token of who had ended, and an evidence without what weights have gained.
    """
    told = serve(3 * len(TRACED), *TRACED, max_lag=30)
    every = [traced for one in told for traced in one.trace.rounds]
    for number, choice in enumerate(TRACED):
        of_choice = told[number :: len(TRACED)]
        rounds = [traced for one in of_choice for traced in one.trace.rounds]
        sizes = {len(traced.ancestors) for traced in rounds}
        assert sizes == {choice.get("num_particles", 5)}
        longest = max(len(draft) for traced in rounds for draft in traced.drafted)
        assert longest == choice.get("num_steps", 4)
        cuts = {traced.cut for traced in rounds}
        assert "ess" not in cuts or choice.get("resample_at") == "token"
        for one in of_choice:
            found = assert_told(one)
            begins = [traced.begins is not None for traced in one.trace.rounds]
            assert begins == [place == 0 for place in range(len(begins))]
            if one.trace.mode == "smc":
                evidence = one.req.smc_state.counters[-1]
                assert found.log_evidence == pytest.approx(evidence, abs=1e-9)
            elif one.trace.mode != "exact":
                assert all(traced.log_evidence is None for traced in one.trace.rounds)
    # All of it happens, else the above says nothing of it.
    assert {"none", "evidence", "ess", "verification"} <= {traced.cut for traced in every}
    assert any(traced.resampled and len(set(traced.ancestors)) > 1 for traced in every)
    assert any(traced.narrowed_to is not None and not all(traced.ended) for traced in every)
    assert any(traced.narrowed_to is not None and all(traced.ended) for traced in every)
    assert any(None in traced.bonus and any(traced.bonus) for traced in every)
    assert any([] in traced.drafted and any(traced.drafted) for traced in every)
    assert any(not traced.emitted for traced in every)


BUDGETS = Budget(5, 4), Budget(2, 2), Budget(1, 1), Budget(4, 3)
POWERED = {"power": 2.0, "proposal": "draft", "evidence_threshold": 0}
RESAMPLED = {"power": 2.0, "proposal": "verified", "ess_threshold": 1.0}
RUNS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "cut by evidence": ([{"ess_threshold": 1.0, "evidence_threshold": 1.5}], {}),
    "adaptive": ([{}], {"budgets": BUDGETS}),
    "powered": ([POWERED], {}),
    "verified and powered": ([RESAMPLED], {"num_particles": 6}),
    "powered alone": ([{**POWERED, "num_particles": 1}], {}),
    "weighed in a grammar": ([{}], {"grammar": maker("(ab|b){6}")}),
    "verified in a grammar": ([{"mode": "exact"}], {"grammar": maker("(ab|b){6}")}),
    "greedy": ([{}], {"asked": {"top_k": 1}}),
    "retracted": ([{}], {"retracts_behind": (2,)}),
    # A number that is NaN or infinite is red.
    "dead": ([DYING, {**DYING, "num_particles": 1}], {"asked": {"top_k": 2}}),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_reader_comes_to_the_answer_of_others(name: str) -> None:
    """Weights gain by a power's or a mask's sums, at bonus tokens, too.

    Red if a block that is resampled where its evidence cut it counts as cut for its ESS, a round
    does not tell of its resizing or tells of it once more, first tokens that differ are lost or
    told twice, or tails that a retraction has dropped live on.
    """
    chosen, more = RUNS[name]
    traced = [{"trace": True, **choice} for choice in chosen]
    told = serve(96 if name == "dead" else 12, *traced, **more)
    is_plain = "powered" not in name and "grammar" not in name
    for one in told:
        assert_told(one, is_plain=is_plain)
        rounds = one.trace.rounds
        sizes = [len(traced.ancestors) for traced in rounds]
        changes = [before != now for before, now in itertools.pairwise([*sizes[:1], *sizes])]
        assert [traced.resized_from is not None for traced in rounds] == changes
        assert name == "adaptive" or not any(changes)
        if name == "retracted":
            assert sum(traced.begins is not None for traced in rounds) <= 2
            assert len(rounds) < 3 or rounds[2].begins == [0] * 5
    rounds = [traced for one in told for traced in one.trace.rounds]
    cuts = {traced.cut for traced in rounds}
    if name == "cut by evidence":
        assert cuts == {"none", "evidence"}
        assert any(one.cut == "evidence" and one.resampled and any(one.kept) for one in rounds)
    elif name == "adaptive":
        assert any(traced.resized_from is not None for traced in rounds)
    elif name == "dead":
        assert "dead" in cuts and any(None in traced.log_weights for traced in rounds)
        assert any(None in traced.log_weights_before for traced in rounds)
    elif name == "greedy":
        assert {len(traced.ancestors) for traced in rounds} == {5}, cuts
    elif name.startswith("powered"):
        kinds = {len(set(one.trace.rounds[0].begins or ())) > 1 for one in told}
        assert kinds == ({True, False} if name == "powered" else {False})


@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_particles_are_those_that_come_with_the_answer(resample_at: str) -> None:
    """Texts, and weights: red if the trace has those behind the final draw."""
    asked = {"trace": True, "return_particles": True, "resample_at": resample_at}
    for one in serve(6, asked):
        found = assert_told(one)
        assert one.req.particles is not None
        assert [particle["output_ids"] for particle in one.req.particles] == found.particles
        weights = [particle["weight"] for particle in one.req.particles]
        shares = normalized(torch.tensor(found.log_weights)).tolist()
        assert weights == pytest.approx(shares)


def test_no_token_of_a_prefill_is_lost() -> None:
    """Retracted before the first round, twice in a row, and where prefill draws the last token."""
    behind = (0, 0, 1, *[2] * LENGTH)
    told = serve(8, {"trace": True}, retracts_behind=behind)
    for one in told:
        assert_told(one)
        assert genealogy(one.trace).answer == one.req.output_ids
        assert len(one.trace.rounds[0].emitted_before) == 2
    assert any(one.trace.emitted_after for one in told)


def test_a_short_lag_that_draws_a_text_that_has_ended_leaves_particles() -> None:
    """SGLang finds the end in what is emitted. Red if particles are those of a final draw alone."""
    asked = {"trace": True, "return_particles": True, "max_lag": 2}
    by_lag = 0
    told = serve(24, asked, max_lag=30)
    for one in (one for one in told if one.trace.rounds):
        assert one.req.particles is not None
        assert sum(particle["weight"] for particle in one.req.particles) == pytest.approx(1.0)
        texts = [particle["output_ids"] for particle in one.req.particles]
        if not all(text[-1] == EOS or len(text) == LENGTH for text in assert_told(one).particles):
            by_lag += 1
            assert texts == [one.req.output_ids] * 5
        assert one.req.output_ids in texts
    assert 0 < by_lag < 24, "both kinds of ends"


def test_a_round_that_fails_says_so_and_has_no_number_that_json_lacks() -> None:
    """Logits that are NaN: the record has null or 0 in place of what means nothing."""
    given = SERVER | {"chosen": ({"trace": True}, {"trace": True, "mode": "exact"})}
    worker = toy(2, languages(), **given)
    reqs = worker.begin([1, 2])
    worker.target.language.logits.fill_(math.nan)
    result = worker.play_round(reqs)
    copied = each_tensor(torch.clone, result.outcome.extras["trace"])  # as the host reads it
    for group, req in enumerate(reqs):
        states = [copy.deepcopy(req.smc_state) for _ in range(2)]
        of_copy, own = (
            found.traced_round(group, state, [], 0.0)
            for found, state in zip((copied, result.outcome.extras["trace"]), states, strict=True)
        )
        assert of_copy == own
        worker.take(result, group, req)
        (traced,) = req.smc_state.rounds
        assert traced.cut == "failure" and traced.emitted == []
        assert set(traced.bonus) == {None}
        assert "NaN" not in json.dumps(read(told(req)).rounds, default=msgspec.to_builtins)
