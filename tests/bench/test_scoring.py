"""Scores of answers: what the plain models say, and which answers still lack it."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import prompt_ids
from fidelity.grid import AR_TARGET, Cell, Kind
from fidelity.measure import Record
from fidelity.scoring import (
    Batch,
    Score,
    _score_batch,
    answer_key,
    load,
    score_answers,
    score_cells,
    score_log,
    score_of,
)
from pair.task import held_out

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """One that ends, and one that the length limit cut, of other lengths behind other prompts."""
    _, tokenizer = load()
    whole = [tokenizer.encode(held_out(i).answer, add_special_tokens=False) for i in (0, 1)]
    return [[*whole[0][:20], 1], whole[1][:9]]


def test_scores_are_those_of_a_slow_direct_computation(answers: list[list[int]]) -> None:
    """Token by token, each behind its own prefix, with sums over the vocabulary in plain Python."""
    models, tokenizer = load()
    assert tokenizer.eos_token_id == answers[0][-1]
    prompts = [prompt_ids(tokenizer, i) for i in (0, 1)]
    found = score_answers(models, prompts, answers, TEMPERATURE)
    batch = Batch(7, TEMPERATURE, [0, 1], answers)
    assert _score_batch(batch) == (7, [score_of(i, answers[i], found[i]) for i in (0, 1)])
    for i in (0, 1):
        score = score_of(i, answers[i], found[i])
        expected = slowly(models, prompts[i], answers[i])
        assert score.log_ratios == pytest.approx(expected.pop("log_ratios"), abs=2e-4)
        assert {name: vars(score)[name] for name in expected} == pytest.approx(expected, abs=2e-3)
        assert (score.index, score.tokens) == (i, len(answers[i]))


def slowly(models: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    sums = dict.fromkeys(("log_p", "innovation", "variance", "tilt", "information"), 0.0)
    log_ratios = []
    for place, token in enumerate(answer):
        p, q = (law(model, [*prompt, *answer[:place]]) for model in models)
        entropy = -sum(a * math.log(a) for a in p)
        ratios = [math.log(b / a) for a, b in zip(p, q, strict=True)]
        mean = sum(a * x for a, x in zip(p, ratios, strict=True))
        sums["log_p"] += math.log(p[token])
        sums["innovation"] += math.log(p[token]) + entropy
        sums["variance"] += sum(a * math.log(a) ** 2 for a in p) - entropy**2
        sums["tilt"] += ratios[token] - mean
        sums["information"] += sum(a * (x - mean) ** 2 for a, x in zip(p, ratios, strict=True))
        log_ratios.append(ratios[token])
    return {**sums, "log_ratios": log_ratios}


@torch.inference_mode()
def law(model: Any, text: list[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([text])).logits[0, -1].double()
    weights = [math.exp(value / TEMPERATURE) for value in logits.tolist()]
    return [weight / sum(weights) for weight in weights]


def record(index: int, tokens: list[int]) -> Record:
    return Record(index, True, 0, 1.0, tokens, {})


def canned(index: int, tokens: list[int]) -> Score:
    return Score(index, answer_key(tokens), len(tokens), -1.0, 0.0, 1.0, 0.0, 1.0, [0.0])


def test_an_interrupted_run_goes_on_and_another_answer_is_scored_anew(tmp_path: Path) -> None:
    cell = Cell(Kind(AR_TARGET, "target"), 1.0)
    scores = score_log(tmp_path / "scores", {"cell": cell.slug})
    records = [record(i, [i, 1] + [2] * (80 - i)) for i in range(80)]
    scored: list[int] = []

    def some(batches: Any, jobs: int) -> Iterator[tuple[int, list[Score]]]:
        for batch in batches[: 2 if jobs == 1 else None]:
            scored.extend(batch.indices)
            yield batch.place, list(map(canned, batch.indices, batch.answers))
        if jobs == 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        score_cells([(cell, scores.missing(records), scores)], some, 1)
    assert len(scored) == 64
    score_cells([(cell, scores.missing(records), scores)], some, 2)
    assert sorted(scored) == list(range(80))
    records[3] = record(3, [9, 1])
    score_cells([(cell, scores.missing(records), scores)], some, 2)
    assert scored[80:] == [3]
    assert scores.missing(records) == []
    assert scores.read()[3].answer == answer_key([9, 1])
