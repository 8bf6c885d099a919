"""SGLang's own speculative decoding on the CPU platform: the text of decoding without it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laws import enumerate_law, next_probs, p_value

from sglang_smc import upstream

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not upstream.NEWEST.is_installed, reason="this SGLang asks no platform for its workers"
    ),
]

ALPHA = 1e-4
EOS = 1
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
#: One token, and others; some are prefilled in chunks of 64. The last answer fills the context.
PROMPTS = [[5], [9] * 20, [8, 1, 30], [2, 44] * 35, [*range(2, 60), *range(60, 1, -1)] * 2]
PROMPTS[-1] = PROMPTS[-1][:231]
CHUNKS = {"chunked_prefill_size": 64}
TOY = {"vocab_size": 4, "scale": 0.5}


def chain(target: str, draft: str, **settings: Any) -> dict[str, Any]:
    sizes = {"steps": 3, "topk": 1, "nodes": 4} | settings
    return {
        "model_path": target,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": sizes["steps"],
        "speculative_eagle_topk": sizes["topk"],
        "speculative_num_draft_tokens": sizes["nodes"],
        **CHUNKS,
    }


@pytest.fixture(scope="module")
def target(tiny: Callable[..., str]) -> str:
    return tiny(seed=3, vocab_size=64)


@pytest.fixture(scope="module")
def asked(engine: Callable[..., Any], target: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests that end in each way, and what decoding without speculation answers."""
    plain = engine(model_path=target, **CHUNKS)
    given = [{"input_ids": ids, "sampling_params": GREEDY} for ids in PROMPTS]
    texts = [plain.generate(**request) for request in given]
    for ids, text in zip(PROMPTS, texts, strict=True):
        ends = [
            {"max_new_tokens": 1},
            {"max_new_tokens": 6},
            {"stop": text["text"].split()[7]},
            {"stop_token_ids": [text["output_ids"][5]]},
            {"regex": "(t7|t8){5}"},
            {"logit_bias": {str(EOS): 5.0}},
        ]
        given += [{"input_ids": ids, "sampling_params": {**GREEDY, **end}} for end in ends]
    answers = [plain.generate(**request, return_logprob=True) for request in given]
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    assert reasons == {"stop", "length"}
    assert any(answer["output_ids"][-1] == EOS for answer in answers)
    return list(zip(given, answers, strict=True))


def assert_same_answers(
    running: Any, asked: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[float]:
    """All at once, so that rows come and go; the mean tokens of a round, by request."""
    given, wanted = zip(*asked, strict=True)
    answers = running.generate(
        input_ids=[request["input_ids"] for request in given],
        sampling_params=[request["sampling_params"] for request in given],
        return_logprob=True,
    )
    for answer, plain in zip(answers, wanted, strict=True):
        assert answer["output_ids"] == plain["output_ids"]
        assert answer["text"] == plain["text"]
        found, known = answer["meta_info"], plain["meta_info"]
        assert found["finish_reason"] == known["finish_reason"]
        values = [[value for value, *_ in m["output_token_logprobs"]] for m in (found, known)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    lengths = [answer["meta_info"].get("spec_accept_length") for answer in answers]
    return [length for length in lengths if length is not None]


def test_standalone_gives_the_text_of_its_target(
    asked: list, engine: Callable[..., Any], target: str
) -> None:
    running = engine(**chain(target, target))
    lengths = assert_same_answers(running, asked)
    assert sum(lengths) / len(lengths) > 1.5
    again = running.generate(input_ids=PROMPTS[-1], sampling_params=GREEDY)
    assert again["meta_info"]["cached_tokens"] == len(PROMPTS[-1]) - 1
    assert again["output_ids"] == asked[len(PROMPTS) - 1][1]["output_ids"]


@pytest.mark.parametrize(("steps", "topk", "nodes"), [(1, 1, 2), (3, 4, 8)], ids=["1 step", "tree"])
def test_standalone_of_other_shapes(
    asked: list, engine: Callable[..., Any], target: str, steps: int, topk: int, nodes: int
) -> None:
    running = engine(**chain(target, target, steps=steps, topk=topk, nodes=nodes))
    lengths = assert_same_answers(running, asked)
    assert sum(lengths) / len(lengths) > 1.3


def test_standalone_with_a_draft_that_is_always_wrong(
    asked: list, engine: Callable[..., Any], tiny: Callable[..., str], target: str
) -> None:
    assert_same_answers(engine(**chain(target, tiny(seed=4, vocab_size=64))), asked)


def test_ngram_gives_the_text_of_its_target(
    asked: list, engine: Callable[..., Any], target: str
) -> None:
    speculation = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    running = engine(model_path=target, **speculation, **CHUNKS)
    assert_same_answers(running, asked)
    lengths = assert_same_answers(running, asked)
    assert sum(lengths) / len(lengths) > 2, "the texts are known by now"


@pytest.mark.parametrize(
    ("algorithm", "architecture", "topk", "nodes"),
    [
        ("EAGLE", "LlamaForCausalLMEagle", 1, 4),
        ("EAGLE", "LlamaForCausalLMEagle", 4, 8),
        ("EAGLE3", "LlamaForCausalLMEagle3", 1, 4),
    ],
)
def test_eagle_gives_the_text_of_its_target(
    asked: list,
    engine: Callable[..., Any],
    target: str,
    tmp_path: Path,
    algorithm: str,
    architecture: str,
    topk: int,
    nodes: int,
) -> None:
    """With a draft of random weights, whose tokens seldom are the target's."""
    config = json.loads(Path(target, "config.json").read_text())
    config |= {"architectures": [architecture], "num_hidden_layers": 1}
    config["draft_vocab_size"] = config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = chain(target, str(tmp_path), topk=topk, nodes=nodes)
    settings |= {"speculative_algorithm": algorithm, "speculative_draft_load_format": "dummy"}
    # SGLang keeps the context's end free from requests to such a server.
    shorter = [each for each in asked if len(each[0]["input_ids"]) < 200]
    assert_same_answers(engine(**settings), shorter)


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.3}], ids=["plain", "k", "p"]
)
@pytest.mark.parametrize(("topk", "nodes"), [(1, 4), (2, 6)], ids=["chain", "tree"])
def test_samples_follow_the_target(
    engine: Callable[..., Any],
    tiny: Callable[..., str],
    topk: int,
    nodes: int,
    limits: dict[str, Any],
) -> None:
    """2,000 texts of five tokens against all that there are."""
    pair, prompt = (tiny(seed=1, **TOY), tiny(seed=2, **TOY)), [3, 2, 3]
    running = engine(**chain(*pair, topk=topk, nodes=nodes), max_running_requests=128)
    probs = next_probs(pair[0], prompt, **limits)
    law = enumerate_law(5, EOS, lambda _: probs)
    params = {"temperature": 1.0, "max_new_tokens": 5, **limits}
    answers = running.generate(input_ids=[prompt] * 2000, sampling_params=params)
    assert p_value((tuple(answer["output_ids"]) for answer in answers), law) > ALPHA
    accepted = sum(a["meta_info"].get("spec_num_correct_drafts", 0) for a in answers)
    assert accepted > 500, "what was drafted is part of the texts"
