"""Penalties, biases and custom processors through real engines, held against SGLang's own text."""

import contextlib
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import sglang
from http_server import Server, running_server
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor as NoRepeat,
)
from sglang.srt.sampling.custom_logit_processor import (
    DisallowedTokensLogitsProcessor as Disallowed,
)
from tiny_models import ENGINE_DEFAULTS, smc_arguments

from sglang_smc.options.server import CPU_OVERLAP_ENV

pytestmark = pytest.mark.engine

WIDE = {"vocab_size": 64, "scale": 0.3}
SMC = {"num_particles": 4, "num_steps": 3, "max_lag": 32}
PROMPTS = [[3, 4, 5 + index, 9] for index in range(4)]
BIAS = {str(token): -100.0 if token % 3 else 2.0 for token in range(2, 40)}
BIGRAMS = {"ngram_size": 2, "window_size": 200}

# What a request asks for: sampling parameters, and a processor where it has one. None asks for
# repetition_penalty beside another penalty: without its overlap schedule SGLang applies the two in
# the order of a Python set of classes, which differs from process to process.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.7},
    "rewards": {"frequency_penalty": -0.4, "presence_penalty": -1.0},
    "bias": {"logit_bias": BIAS},
    "several": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": BIAS},
    "no early end": {"min_new_tokens": 25, "presence_penalty": 1.5, "ignore_eos": False},
    "disallowed": {"processor": Disallowed, "custom_params": {"token_ids": list(range(5, 45))}},
    "no repeats": {"processor": NoRepeat, "custom_params": BIGRAMS, "frequency_penalty": -1.0},
}


def batch(smc: dict[str, Any] | None, temperature: float, **more: Any) -> dict[str, Any]:
    """Every prompt with all that may be asked for, in one batch; without ``smc`` for AR."""
    inputs, params, processors = [], [], []
    for asked in ASKED.values():
        for index, prompt in enumerate(PROMPTS):
            given = {"max_new_tokens": 30, "ignore_eos": True, "temperature": temperature, **asked}
            processor = given.pop("processor", None)
            own = {} if smc is None else {"smc": smc, "unknown to processors": index}
            given["custom_params"] = {**given.get("custom_params", {}), **own}
            inputs.append(prompt)
            params.append({**given, **more})
            processors.append(processor and processor.to_str())
    return {"input_ids": inputs, "sampling_params": params, "custom_logit_processor": processors}


def by_name(answers: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    outputs = [answer["output_ids"] for answer in answers]
    size = len(PROMPTS)
    return {name: outputs[i * size : (i + 1) * size] for i, name in enumerate(ASKED)}


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, **WIDE), tiny(seed=2, **WIDE)


@pytest.fixture(scope="module")
def stock(pair: tuple[str, str]) -> dict[str, list[list[int]]]:
    """What SGLang without SMC answers at temperature 0."""
    # Its overlap schedule counts each token one step late.
    own = {"enable_custom_logit_processor": True, "disable_overlap_schedule": True}
    with sglang.Engine(**{**ENGINE_DEFAULTS, "model_path": pair[0], **own}) as engine:
        found = by_name(engine.generate(**batch(None, 0.0)))
    assert len({str(texts) for texts in found.values()}) == len(ASKED), "each changes the text"
    return found


@pytest.fixture(scope="module")
def serve(
    stock: object, pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """One server at a time: as it is, or with results one round late and many retractions."""
    arguments = smc_arguments(*pair, **SMC, enable_custom_logit_processor=True)
    late_one = {
        CPU_OVERLAP_ENV: "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "2",  # while two run, one is certain to go
    }
    running: dict[bool, Server] = {}
    with contextlib.ExitStack() as stack:

        def start(*, late: bool = False) -> Server:
            if late not in running:
                stack.close()
                running.clear()
                folder = tmp_path_factory.mktemp("server")
                environment = late_one if late else {}
                one = running_server(folder, environment, **arguments)
                running[late] = stack.enter_context(one)
            return running[late]

        yield start


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed", "auto"])
def test_at_temperature_0_the_text_is_sglang_s(
    serve: Callable[..., Server], stock: dict[str, list[list[int]]], mode: str
) -> None:
    found = by_name(serve().post("/generate", **batch({"mode": mode}, 0.0)).json())
    for name in ASKED:
        assert found[name] == stock[name], name


@pytest.mark.parametrize(
    "smc", [{}, {"mode": "exact"}, {"mode": "mixed"}, {"power": 2.0}, {"resample_at": "token"}]
)
def test_a_processor_reads_the_text_of_each_particle(
    serve: Callable[..., Server], smc: dict[str, Any]
) -> None:
    """Particles differ here; one that was shown another's text would repeat itself."""
    answers = by_name(serve().post("/generate", **batch(smc, 1.0, sampling_seed=7)).json())
    assert any(_repeats(output) for output in answers["rewards"]), "else nothing is shown"
    for prompt, output in zip(PROMPTS, answers["no repeats"], strict=True):
        assert not _repeats([*prompt, *output])
    assert not any(set(output) & set(range(5, 45)) for output in answers["disallowed"])
    banned = {int(token) for token, value in BIAS.items() if value < 0}
    assert not any(set(output) & banned for output in answers["bias"] + answers["several"])


def _repeats(text: list[int]) -> bool:
    pairs = list(pairwise(text))
    return len(set(pairs)) < len(pairs)


def test_a_processor_that_fails_ends_its_own_request(serve: Callable[..., Server]) -> None:
    given = batch({}, 0.0)
    good = by_name(serve().post("/generate", **given).json())
    params = {"max_new_tokens": 8, "custom_params": {"smc": {}}}  # no token_ids
    bad = {"input_ids": [3, 4], "custom_logit_processor": Disallowed.to_str()}
    answer = serve().post("/generate", **bad, sampling_params=params)
    assert answer.status_code == 400
    assert "custom logit processor raised KeyError" in answer.text
    assert by_name(serve().post("/generate", **given).json()) == good


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"custom_logit_processor": "code"}, "custom_logit_processor"),
        ({"sampling_params": {"logit_bias": {"5": "much"}}}, "logit_bias|expected f64"),
        ({"sampling_params": {"logit_bias": [5]}}, "logit_bias|expected a map"),
        ({"sampling_params": {"logit_bias": {"64": 1.0}}}, "logit_bias"),
        ({"sampling_params": {"frequency_penalty": 3}}, "frequency_penalty"),
    ],
)
def test_what_makes_no_sense_is_http_400(
    serve: Callable[..., Server], fields: dict, named: str
) -> None:
    answer = serve().post("/generate", input_ids=[3, 4], **fields)
    assert answer.status_code == 400
    assert re.search(named, answer.text)
    assert serve().post("/generate", input_ids=[3]).status_code == 200


def test_openai_clients_penalize_and_bias(serve: Callable[..., Server]) -> None:
    """The completion route hands the same parameters on."""
    fields = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": BIAS}
    body = {"model": "m", "prompt": "t3 t4", "max_tokens": 20, "temperature": 0.0, **fields}
    plain = {**body, "logit_bias": None, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    text, before = (
        serve().post("/v1/completions", **one).json()["choices"][0]["text"] for one in (body, plain)
    )
    assert text != before
    native = {"max_new_tokens": 20, "temperature": 0.0, **fields}
    same = serve().post("/generate", text="t3 t4", sampling_params=native).json()["text"]
    assert text == same


@pytest.mark.parametrize("mode", ["smc", pytest.param("exact", marks=pytest.mark.thorough)])
def test_late_results_and_retractions_change_nothing(
    serve: Callable[..., Server], stock: dict[str, list[list[int]]], mode: str
) -> None:
    """A retracted text goes on with its counts, which SGLang's own penalties would forget."""
    answers = serve(late=True).post("/generate", **batch({"mode": mode}, 0.0)).json()
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    found = by_name(answers)
    for name in ASKED:
        assert found[name] == stock[name], name
