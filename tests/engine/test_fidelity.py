"""What a server says of its answers' law, against both models' own words on the same answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pair.task import held_out, messages
from tiny_models import smc_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_smc.smc.fidelity import measured

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
ROOM = {"max_total_tokens": 100_000, "max_running_requests": 32, "context_length": 1024}
SIZE, NUM_STEPS, TEMPERATURE = 60, 8, 0.7
MODES: dict[str, dict[str, Any]] = {
    "smc, c = 0": {"evidence_threshold": 0},
    "smc": {},
    "mixed, c = 2": {"mode": "mixed", "evidence_threshold": 2},
    "auto": {"mode": "auto"},
    "exact": {"mode": "exact"},
}


class Sums(NamedTuple):
    """Of some answers, each ``[SIZE]``."""

    pull: torch.Tensor
    information: torch.Tensor
    innovation: torch.Tensor
    watched: torch.Tensor


def told(answers: list[dict[str, Any]]) -> Sums:
    """What the server has added up; an answer that ended with its first token had no round."""
    infos = [answer["meta_info"] for answer in answers]
    names = ("tilt", "tilt_information", "innovation", "watched_ct")
    each = [[info["spec_smc_" + name] or 0.0 for name in names] for info in infos]
    tilt, information, innovation, watched = torch.tensor(each).double().unbind(1)
    return Sums(tilt * information, information, innovation * watched, watched)


@torch.no_grad()
def rescored(prompts: list[list[int]], answers: list[dict[str, Any]], models: list[Any]) -> Sums:
    """The same of all tokens behind the first, by plain forwards over the whole texts."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = answer["output_ids"]
        text = torch.tensor([[*prompt, *ids]])
        log_p, log_q = (
            (model(text).logits[0, len(prompt) : -1].double() / TEMPERATURE).log_softmax(1)
            for model in models
        )
        terms = measured(log_p, log_q, torch.tensor(ids[1:], dtype=torch.int64))
        found.append([*(float(term.sum()) for term in terms), len(ids) - 1.0])
    return Sums(*torch.tensor(found).double().unbind(1))


def errors(values: torch.Tensor) -> float:
    """A mean in its standard errors."""
    return float(values.mean() / (values.std() / len(values) ** 0.5))


def test_the_server_and_the_models_say_the_same(engine: Callable[..., Any]) -> None:
    """In every mode, to 4.5 standard errors of watching one position a round (7e-6 each)."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    shown = {"tokenize": False, "add_generation_prompt": True}
    texts = [tokenizer.apply_chat_template(messages(held_out(i)), **shown) for i in range(SIZE)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (TARGET, DRAFT)
    ]
    running = engine(**smc_arguments(TARGET, DRAFT, num_particles=8, num_steps=NUM_STEPS, **ROOM))
    tilts = {}
    for mode, smc in MODES.items():
        answers = running.generate(
            input_ids=prompts,
            sampling_params=[
                {
                    "temperature": TEMPERATURE,
                    "max_new_tokens": 160,
                    "sampling_seed": 1000 + i,
                    "custom_params": {"smc": smc},
                }
                for i in range(SIZE)
            ],
        )
        ours, theirs = told(answers), rescored(prompts, answers, models)
        tilts[mode] = float(theirs.pull.sum() / theirs.information.sum())
        found = float(ours.pull.sum() / ours.information.sum())
        rests = ours.pull - tilts[mode] * ours.information
        error = float(rests.square().sum().sqrt() / ours.information.sum())
        once = [one * (NUM_STEPS + 1) - whole for one, whole in zip(ours, theirs, strict=True)]
        of_innovation, of_count = errors(once[2]), errors(once[3])
        print(
            f"{mode}: tilt {found:.3f} +- {error:.3f}, of the models {tilts[mode]:.3f}; "
            f"innovation off by {of_innovation:.1f} and tokens by {of_count:.1f} standard errors"
        )
        assert abs(found - tilts[mode]) < 4.5 * error
        assert abs(of_innovation) < 4.5
        assert abs(of_count) < 4.5
    # Expected: 0.4 and 0; each has a standard error of 0.07, so that 0.1 fails once in 1,000 runs.
    assert tilts["smc, c = 0"] > tilts["exact"] + 0.1
    windows = running.get_server_info()["internal_states"][0]["smc"]["fidelity"]
    assert windows["all"]["answers"] >= SIZE * len(MODES) - 5
    assert windows["exact"]["tilt"] == pytest.approx(0.0, abs=4.5 * windows["exact"]["tilt_error"])
