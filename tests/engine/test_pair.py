"""The shipped models load in real engines and are as good as they are said to be."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import prompt_ids
from http_server import Server, running_server
from pair.reward_texts import TEMPLATE, WHOLE_TEMPLATE
from pair.task import check, held_out, messages
from tiny_models import smc_arguments
from transformers import AutoTokenizer, LlamaForSequenceClassification

from sglang_smc.options.server import PROPOSALS
from sglang_smc.potentials import Text
from sglang_smc.potentials.library import EndpointError, Http
from sglang_smc_tools.testing import check_potential

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET = str(PAIR / "target")
DRAFT = str(PAIR / "draft")
SIZE = 250
SAMPLING = {"temperature": 0.7, "max_new_tokens": 160}
ROOM = {"max_total_tokens": 100_000, "max_running_requests": 32, "context_length": 1024}


def accuracy(engine: Any) -> float:
    """Return the share of held-out problems that are solved at the stated temperature."""
    items = [held_out(i) for i in range(SIZE)]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    shown = {"tokenize": False, "add_generation_prompt": True}
    prompts = [tokenizer.apply_chat_template(messages(item), **shown) for item in items]
    answers = engine.generate(prompts, [{**SAMPLING, "sampling_seed": i} for i in range(SIZE)])
    return sum(check(a["text"], item) for a, item in zip(answers, items, strict=True)) / SIZE


def stated(name: str) -> float:
    return json.loads((PAIR / "measurements.json").read_text())[name]["mean"]


def test_target_draft_and_smc_between_them(engine: Callable[..., Any]) -> None:
    # Four standard errors: fails by chance 6e-5 of the time, for these seeds never.
    slack = 4 * math.sqrt(0.25 / SIZE)
    target = accuracy(engine(model_path=TARGET, **ROOM))
    draft = accuracy(engine(model_path=DRAFT, **ROOM))
    smc = accuracy(engine(**smc_arguments(TARGET, DRAFT, num_particles=8, num_steps=8, **ROOM)))
    assert abs(target - stated("target accuracy")) < slack
    assert abs(draft - stated("draft accuracy")) < slack
    assert smc > draft + 0.2  # eight particles make most of the way from draft to target


@pytest.mark.parametrize("power", [2.0, 4.0])
def test_verified_chains_halve_the_variance_of_evidence(
    engine: Callable[..., Any], power: float
) -> None:
    """Red where texts are resampled for being short, which had it no lower at power 2."""
    pair = engine(**smc_arguments(TARGET, DRAFT, num_particles=8, num_steps=8, **ROOM))
    problems = 6
    seeds = 24
    ids = [prompt_ids(held_out(i)) for i in range(problems) for _ in range(seeds)]
    variances = {}
    for proposal in PROPOSALS:
        smc = {"mode": "smc", "power": power, "proposal": proposal}
        own = {"temperature": 1.0, "max_new_tokens": 160, "custom_params": {"smc": smc}}
        asked = [{**own, "sampling_seed": 1000 + i % seeds} for i in range(len(ids))]
        answers = pair.generate(input_ids=ids, sampling_params=asked)
        found = torch.tensor([one["meta_info"]["spec_smc_log_evidence"] for one in answers])
        variances[proposal] = found.view(problems, seeds).var(1).mean()
    assert variances["verified"] < variances["draft"] / 2


# --- The reward model, served by stock SGLang, says what transformers says it does


REWARD = PAIR / "reward"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("reward")
    with running_server(folder, model_path=str(REWARD), is_embedding=True) as running:
        yield running


@pytest.fixture(scope="module")
def potential(server: Server) -> Http:
    return Http(server.url, template=TEMPLATE, whole_template=WHOLE_TEMPLATE)


def mistaken(answer: str) -> str:
    """A right answer, but for the operator of its first step, whose result is right again."""

    def other(found: re.Match[str]) -> str:
        one = int(found[1])
        sign = found[2]
        two = int(found[3])
        return f"{one}-{two}={abs(one - two)}" if sign == "+" else f"{one}+{two}={one + two}"

    return re.sub(r"(\d+)([-+x*/])(\d+)=\d+", other, answer, count=1)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Right and wrong answers to ten problems, each as a whole and up to its first line's end."""
    tokenizer = AutoTokenizer.from_pretrained(REWARD)
    found = []
    for index in range(10):
        item = held_out(index)
        for answer in (item.answer, mistaken(item.answer)):
            for output in (answer, answer.split("\n")[0] + "\n"):
                ids = [tokenizer(part)["input_ids"] for part in (item.question, output)]
                found.append(Text(*ids, None, tokenizer.decode))
    return found


@torch.inference_mode()
def by_transformers(texts: list[str]) -> list[float]:
    """One text at a time: there is no padding to do wrong."""
    tokenizer = AutoTokenizer.from_pretrained(REWARD)
    model = LlamaForSequenceClassification.from_pretrained(REWARD, dtype=torch.float32).eval()
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    return [model(input_ids=row).logits.item() for row in ids]


def test_values_are_those_of_transformers(potential: Http, texts: list[Text]) -> None:
    """Red where the server reads another text, another token's output or other weights."""
    read = [TEMPLATE.format(prompt=t.prompt, output=t.output) for t in texts]
    expected = by_transformers(read)
    assert potential.prefix(texts) == pytest.approx(expected, abs=1e-3)
    marked = by_transformers(
        [WHOLE_TEMPLATE.format(prompt=t.prompt, output=t.output) for t in texts]
    )
    assert potential.complete(texts) == pytest.approx(marked, abs=1e-3)
    assert max(expected) - min(expected) > 1.0, "a model that says the same of all proves nothing"


def test_it_is_consistent(potential: Http, texts: list[Text]) -> None:
    """Red where a value depends on the batch, or on the server's cache of beginnings."""
    results = check_potential(potential, texts[::8], most_beginnings=6, tolerance=1e-3)
    assert not [result.note for result in results if result.failed]


def test_it_tells_right_from_wrong(potential: Http, texts: list[Text]) -> None:
    """Red where the checkpoint is not the one that was trained."""
    values = potential.complete(texts)
    of_right = values[::4]
    of_wrong = values[2::4]
    above = [one > other for one in of_right for other in of_wrong]
    assert sum(above) / len(above) > 0.8, "it is 0.94 of these"


def test_the_other_route_has_shares_of_one_label(server: Server, texts: list[Text]) -> None:
    """Red where /v1/classify's softmax of one label, always 1, passes for a judgement."""
    with pytest.raises(EndpointError, match="needs 2"):
        Http(server.url, route="/v1/classify", as_log="log").complete(texts[:1])
