"""A recorded round is the round: batches of any size, padded to a recording's, change no answer.

Without a GPU the recorder keeps the function and runs it again over the same tensors: what a graph
adds to a round, its fixed places for figures and results, its padding and its choice of recording,
is all here but the replay itself.
"""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from toy_grammar import Letters, maker, runners
from toy_laws import toy
from toy_logprobs import AskingWorker
from toy_worker import Outcome as Texts

from sglang_smc.models.recorder import Ranks, Record
from sglang_smc.options.request import OFF, Budget
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import shape_of_server
from sglang_smc.round.capture import Captures, Server
from sglang_smc.round.costs import costs_of_recordings
from sglang_smc.round.result import Outcome
from sglang_smc.smc.settings import Need
from sglang_smc.state.logprobs import LogprobWidths

SIZES = [2, 3, 8]
FIVE = [1, 2, 3, 4, 5]
CHOSEN: tuple[dict[str, Any], ...] = ({}, {"num_particles": 2}, {"num_steps": 1})


def in_place(played: list[int]) -> Record:
    """Records by running anew, and writes where the first run did, as a graph would.

    Args:
        played: takes the size of each round that is replayed, and 0 for a model's pass alone.
    """
    running: list[Any] = []

    def record(run: Any) -> tuple[Any, Any]:
        found = run()

        def replay() -> None:
            if not running:  # a graph would run no code that could replay another
                played.append(len(found.counts) if isinstance(found, Outcome) else 0)
            running.append(run)
            for place, value in zip(tree_leaves(found), tree_leaves(run()), strict=True):
                if place is not None:
                    place.copy_(value)
            running.pop()

        return found, replay

    return record


def serve(
    recorded: list[int] | None = None,
    *,
    most_launched: int | None = None,
    rows: list[int] = FIVE,
    **options: Any,
) -> Texts:
    """Texts of requests, by recordings of `SIZES` if there is a list to note them in.

    Args:
        most_launched: requests of a round that is no replay.
        options: of `toy_laws.toy`.
    """
    given = {"num_particles": 3, "num_steps": 2, "chosen": CHOSEN, **options}
    own = toy(9, **given)
    recordings = None
    if recorded is not None:
        server = Server(own.worker._round, own.worker._tables, own.config, SIZES, own.device)
        recordings = server.record(in_place(recorded), Ranks())
        if own.config.adapts:
            costs = costs_of_recordings(recordings, own.config, 9, own.worker._tables)
            assert set(costs.rounds) == set(costs.reading) == {*recordings.of_budget} - {None}
        recorded.clear()
    own.worker._captures = Captures(recordings, most_launched)
    texts = own.run(rows)
    own.check_owned()
    return texts


def assert_same(found: Texts, expected: Texts, rounding: float = 0.0) -> None:
    assert torch.equal(found.outputs, expected.outputs)
    assert torch.allclose(found.log_evidence, expected.log_evidence, rtol=0, atol=rounding)
    assert torch.allclose(found.fidelity, expected.fidelity, rtol=0, atol=10 * rounding)
    assert found.num_rounds == expected.num_rounds


def replayed(rounding: float = 0.0, **case: Any) -> list[int]:
    """Sizes of the rounds that are replayed; texts are those without recordings."""
    recorded: list[int] = []
    assert_same(serve(recorded, **case), serve(**case), rounding)
    assert recorded
    return recorded


@pytest.mark.parametrize(
    ("mode", "size"), [("smc", 1), ("smc", 5), ("exact", 2), ("exact", 8), ("auto", 5)]
)
def test_recorded_rounds_give_the_same_texts(mode: str, size: int) -> None:
    recorded = replayed(mode=mode, rows=list(range(1, size + 1)))
    assert recorded[0] == min(s for s in SIZES if s >= size), "the smallest that holds the batch"


@pytest.mark.parametrize("mode", ["smc", "exact"])
def test_recorded_rounds_of_changing_size_give_the_same_texts(mode: str) -> None:
    """Each budget has recordings of its own; populations are resized before one is replayed."""
    budgets = (Budget(3, 2), OFF, Budget(3, 1), Budget(1, 2))
    assert len(replayed(1e-6, mode=mode, adaptive="on", budgets=budgets)) > 1


@pytest.mark.parametrize("asked", [{}, {"top_k": 1}], ids=["sampled", "greedy"])
def test_a_wider_recording_verifies_no_drafts_that_are_not_there(asked: dict[str, Any]) -> None:
    """Edits replay the recording of all kinds, which has columns for drafts."""
    asked = {"logit_bias": {"1": 0.0}, **asked}
    replayed(mode="exact", adaptive="on", budgets=(OFF,), asked=asked, rows=list(range(1, 9)))


MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "exact"},
    {"power": 2.0, "proposal": "draft", "resampling_method": "stratified"},
    {"mode": "auto", "num_particles": 2},
    {"return_particles": True, "resample_at": "token"},
    {"num_steps": 0},
)
EDITS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {"1": 0.8}},
    {},
    {"min_new_tokens": 4},
)
ORDINARY: dict[str, dict[str, Any]] = {
    "top-p": {"asked": {"top_p": 0.8}},
    "top-k": {"asked": {"top_k": 2}},
    "min-p": {"asked": {"min_p": 0.3}},
    "greedy": {"asked": {"top_k": 1}},
    "an end not too early": {"asked": {"min_new_tokens": 2}},
    "penalties": {"asked": {"frequency_penalty": 0.7, "repetition_penalty": 1.5}},
    "a bias": {"asked": {"logit_bias": {"1": 1.0}}},
    "edits that mix": {"asked": EDITS},
    "choices that mix": {"chosen": MIXED},
    "no drafts": {"chosen": ({"num_steps": 0}, {"num_steps": 0, "mode": "smc"})},
    "log-probabilities": {"kind": AskingWorker, "shown": ((2, [0]), None, (0, None))},
    "all at once": {
        "kind": AskingWorker,
        "shown": ((1, None), None),
        "chosen": MIXED,
        "asked": {"top_p": 0.9, "min_new_tokens": 1},
    },
}


@pytest.mark.parametrize(
    ("name", "is_adaptive"),
    [*((name, i % 2 == 1) for i, name in enumerate(ORDINARY)), ("all at once", True)],
)
def test_every_ordinary_request_replays(name: str, is_adaptive: bool) -> None:
    budgets = (Budget(3, 2), Budget(1, 2), OFF) if is_adaptive else (None,)
    server = {"evidence_threshold": 0.0, "budgets": budgets}
    assert 0 not in replayed(1e-6, **server, **ORDINARY[name]), "no model's pass alone"


@pytest.mark.parametrize(
    "case",
    [
        {"grammar": maker("(ab|b)*a?")},
        {"chosen": ({"trace": True}, {"trace": True, "mode": "exact"})},
        {"chosen": ({"trace": True, "num_particles": 2, "num_steps": 1},)},
        {"chosen": ({"trace": True, "num_particles": 1},)},
    ],
    ids=["a grammar", "traces", "fewer columns", "fewer particles"],
)
def test_what_the_host_looks_into_has_its_models_replayed(case: dict[str, Any]) -> None:
    """Red if a recorded round plays it: its trace would be that of the recording, or none."""
    assert not any(replayed(evidence_threshold=0.0, **case)), "passes, and no round"


def test_a_batch_that_no_recording_holds_is_sliced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.SIZES", [3])
    recorded = replayed(rows=list(range(1, 10)))
    assert set(recorded) == {3} and len(recorded) > 2


LAUNCHED: dict[str, dict[str, Any]] = {
    **ORDINARY,
    **{mode: {"chosen": ({"mode": mode},)} for mode in ("smc", "exact", "auto")},
    "a grammar": {"grammar": maker("(ab|b)*a?")},
    "traces": {"chosen": ({"trace": True}, {"trace": True, "mode": "exact"}, {})},
    "potentials": {
        "chosen": ({"potentials": [{"name": "letters", "when": "round"}]}, {}, {}),
        "runners": runners(letters=Letters()),
    },
    "another N and K": {"budgets": (Budget(3, 2), OFF, Budget(2, 1), Budget(1, 2))},
}


@pytest.mark.parametrize("name", list(LAUNCHED))
def test_a_round_in_slices_is_the_round(name: str) -> None:
    """Requests share nothing but the shape of their batch."""
    case = {"evidence_threshold": 0.0, **LAUNCHED[name]}
    assert_same(serve(most_launched=2, **case), serve(**case))


def test_a_recording_covers_less_and_nothing_else() -> None:
    shape = shape_of_server(SMCConfig(num_particles=4, num_steps=3))
    assert not shape.lacks(shape)
    assert not shape.needing({*shape.needs, Need.EDITS}).lacks(shape)
    assert not shape.lacks(shape._replace(num_particles=2, num_steps=1, max_tail=5, max_arena=9))
    for need in set(Need) - shape.needs:
        assert len(shape.lacks(shape.needing({*shape.needs, need}))) == 1, need
    assert len(shape.lacks(shape.scoring(LogprobWidths(1, 0, 0)))) == 1
    more: dict[str, Any] = {"extras": frozenset({"trace"})}
    sizes = "num_particles", "num_steps", "max_tail", "max_arena"
    more |= {name: getattr(shape, name) + 1 for name in sizes}
    for name, value in more.items():
        assert len(shape.lacks(shape._replace(**{name: value}))) == 1, name
