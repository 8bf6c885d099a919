"""Seeded rounds over toy models are what they were: texts, counters, particles and traces.

Laws are proven in property/; an error that leaves a law as it is (a selection that accepts less, a
counter of something else, a wrong number in a trace) shows here. `seeded_rounds.json` is written by

    PYTHONPATH=tests/support python tests/unit/test_seeded_rounds.py

and needs a reason in the commit that changes it. Numbers agree to five digits.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_grammar import END, maker, runners
from toy_traces import serve
from toy_worker import NUM_CONTEXTS, Language

from sglang_smc.options.request import Budget
from sglang_smc.options.server import RESAMPLING_METHODS
from sglang_smc.potentials import Potential, Text
from sglang_smc.state.stream import DETOKENIZATION

RECORD = Path(__file__).with_name("seeded_rounds.json")
# tokens: more than one tile of a cumulative sum
VOCAB = 600
EOS = 5
LENGTH = 14
SIZE = 6
WORDS = [END if token == EOS else f"{token:03d}" for token in range(VOCAB)]
SIZES = {"num_particles": 4, "num_steps": 3, "max_lag": 40, "limit": LENGTH, "eos": EOS}
SERVER: dict[str, Any] = SIZES | {"evidence_threshold": None}
BLOCKS: dict[str, Any] = {"evidence_threshold": 0}
NEVER: dict[str, Any] = {}

POTENTIALS: tuple[dict[str, Any], ...] = (
    {"potentials": [{"name": "even"}], "trace": True},
    {"potentials": [{"name": "even", "when": {"tokens": 3}, "exponent": 2.0}]},
    {"potentials": [{"name": "even", "when": "end"}], "selection": "argmax"},
    {},
)

#: Keywords of the server, what requests choose in turn, their sampling parameters, and budgets.
CASES: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]] = {
    "smc": ({}, ({}, {"max_lag": 1}, {"num_particles": 2, "num_steps": 1}), (NEVER,)),
    "blocks": (BLOCKS, ({}, {"ess_threshold": 1.0}), (NEVER, {"temperature": 0.6})),
    "every method": (
        {"ess_threshold": 1.0},
        tuple({"resampling_method": name} for name in RESAMPLING_METHODS),
        (NEVER,),
    ),
    "at each token": ({}, ({"resample_at": "token", "ess_threshold": 0.9},), (NEVER,)),
    "powers": (
        {"proposal": "draft"},
        ({"power": 2.0}, {"power": 0.5, "return_particles": True}),
        (NEVER,),
    ),
    "exact": ({"mode": "exact"}, ({}, {"num_particles": 1}, {"num_steps": 2}), (NEVER,)),
    "by evidence": (
        {"mode": "auto", "evidence_threshold": 0.5},
        ({}, {"evidence_threshold": 0.8}, {"mode": "smc"}),
        (NEVER,),
    ),
    "auto": ({"mode": "auto"}, ({}, {"tilt": 0.1}), (NEVER,)),
    "filters": (
        {},
        ({}, {"mode": "exact"}),
        ({"top_k": 40}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.01, "top_k": 200}),
    ),
    "greedy": ({}, ({}, {"mode": "exact"}), ({"top_k": 1}, NEVER)),
    "edits": (
        {},
        ({}, {"mode": "exact"}),
        (
            {"frequency_penalty": 1.5, "presence_penalty": 0.5},
            {"repetition_penalty": 1.3, "min_new_tokens": 4},
            {"logit_bias": {"7": 3.0}},
        ),
    ),
    "budgets": ({"num_steps": 4}, ({}, {"mode": "exact"}), (NEVER,)),
    "traces": ({}, ({"trace": True}, {"trace": True, "mode": "exact"}), (NEVER,)),
    "potentials": ({"proposal": "draft"}, POTENTIALS, (NEVER,)),
    "grammar": ({"proposal": "draft"}, ({"trace": True}, {"mode": "exact"}), (NEVER,)),
    "verified": ({}, (*POTENTIALS, {"proposal": "verified", "power": 2.0}), (NEVER,)),
}


class Even(Potential):
    """Prefers even tokens, and forbids texts with one that ends with 77."""

    def complete(self, texts: list[Text]) -> list[float]:
        return [self._log_phi(text.output_ids) for text in texts]

    def _log_phi(self, tokens: tuple[int, ...]) -> float:
        if any(token % 100 == 77 for token in tokens):
            return -math.inf
        return 0.4 * sum(token % 2 == 0 for token in tokens)

    prefix = complete


BUDGETS = {"budgets": (Budget(4, 4), Budget(2, 2), Budget(4, 1), Budget(1, 4))}


def languages() -> tuple[Language, Language]:
    """Return a target with a few likely tokens after each context, and a perturbed draft."""
    drawn = torch.randn(2, NUM_CONTEXTS, VOCAB, generator=torch.Generator().manual_seed(8))
    logits = 2.5 * drawn[0]
    logits[:, EOS] += 4.0
    return Language(logits), Language(logits + 0.9 * drawn[1])


def said(name: str) -> list[dict[str, Any]]:
    """Answer six requests in one batch, and return all that is said of each."""
    server, chosen, asked = CASES[name]
    more = {"asked": asked, "budgets": BUDGETS.get(name, (None,)), "runners": runners(even=Even())}
    if name == "grammar":  # every fifth token of the first half
        more["grammar"] = maker("([0-2][0-9][05])+", WORDS)
    answers = []
    for req, info in serve(SIZE, *chosen, pair=languages(), **(SERVER | server | more)):
        info.pop("spec_smc_particles", None)
        info.pop(DETOKENIZATION, None)  # for the tokenizer manager
        for particle in req.particles or ():
            del particle["finish_reason"]  # of `test_ends`
        answers.append({"output_ids": req.output_ids, "particles": req.particles, **info})
    return answers


def rounded(value: Any) -> Any:
    """Write floats in seven digits, and what JSON has no number for as text."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def differences(found: Any, wanted: Any, place: str = "") -> list[str]:
    """List the places in which two answers differ."""
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        return [d for key in wanted for d in differences(found[key], wanted[key], f"{place}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [d for i, pair in pairs for d in differences(*pair, f"{place}[{i}]")]
    is_float = isinstance(wanted, float) and isinstance(found, float)
    same = math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-6) if is_float else found == wanted
    return [] if same else [f"{place}: {found!r} for {wanted!r}"]


@pytest.mark.parametrize("name", CASES)
def test_seeded_rounds_are_what_they_were(name: str) -> None:
    recorded = json.loads(RECORD.read_text())
    assert recorded.keys() == CASES.keys()
    assert differences(json.loads(json.dumps(rounded(said(name)))), recorded[name]) == []
    texts = [one["output_ids"] for one in recorded[name]]
    assert len({tuple(text) for text in texts}) > 3, "answers that are alike show little"


if __name__ == "__main__":
    found = {name: rounded(said(name)) for name in CASES}
    rows = (f"{json.dumps(name)}: {json.dumps(answers)}" for name, answers in found.items())
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
