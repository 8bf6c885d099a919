"""Stock SGLang on the CPU platform, end to end: a real engine with both strict leak checks on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny_models import ENGINE_DEFAULTS, make_tiny_model
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.engine

NEW_TOKENS = 24
VOCAB = 64
# One token, ragged short prompts, and two that are prefilled in chunks of 64.
PROMPT_LENGTHS = [1, 9, 17, 70, 150]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, seed=3)


@pytest.fixture(scope="module")
def engine(checkpoint):
    import sglang

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        environment.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
        settings = ENGINE_DEFAULTS | {"chunked_prefill_size": 64}
        running = sglang.Engine(model_path=checkpoint, **settings)
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@pytest.fixture(scope="module")
def expected(checkpoint, prompts):
    """Greedy continuations by transformers, one prompt at a time."""
    model: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return [
        model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, use_cache=False
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS}


def test_greedy_equals_transformers(engine, prompts, expected):
    outputs = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [output["output_ids"] for output in outputs] == expected


def test_a_second_request_hits_the_radix_cache(engine, prompts):
    unseen = [0, *prompts[-1]]  # no other prompt starts with token 0
    first, second = (engine.generate(input_ids=unseen, sampling_params=GREEDY) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == len(unseen) - 1
    assert first["output_ids"] == second["output_ids"]


def test_streaming_grows_to_the_same_text(engine, prompts):
    whole = engine.generate(input_ids=prompts[1], sampling_params=GREEDY)["text"]
    stream = engine.generate(input_ids=prompts[1], sampling_params=GREEDY, stream=True)
    texts = [chunk["text"] for chunk in stream]
    assert len(texts) > 1
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert texts[-1] == whole


def test_log_probabilities_are_those_of_transformers(engine, checkpoint, prompts, expected):
    output = engine.generate(input_ids=prompts[1], sampling_params=GREEDY, return_logprob=True)
    model: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logits = model(torch.tensor([prompts[1] + expected[1]])).logits[0, len(prompts[1]) - 1 : -1]
    wanted = logits.log_softmax(-1)[range(NEW_TOKENS), expected[1]].tolist()
    found = [value for value, *_ in output["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_grammar_is_kept(engine, prompts):
    """Beside a request without one, whose tokens it does not touch."""
    free, bound = GREEDY, GREEDY | {"regex": "(t7|t8){5}"}
    outputs = engine.generate(input_ids=[prompts[1]] * 2, sampling_params=[free, bound])
    assert set(outputs[1]["output_ids"][:5]) <= {7, 8}
    assert outputs[1]["meta_info"]["finish_reason"]["type"] == "stop"
    alone = engine.generate(input_ids=prompts[1], sampling_params=free)
    assert outputs[0]["output_ids"] == alone["output_ids"]


def test_a_session_remembers_its_turns(engine, prompts):
    session = engine.open_session(1000)
    text, last = [], None
    for tokens in prompts[1:3]:
        turn = {"id": session, "rid": last}
        answer = engine.generate(input_ids=tokens, sampling_params=GREEDY, session_params=turn)
        text += tokens
        plain = engine.generate(input_ids=text, sampling_params=GREEDY)
        assert answer["output_ids"] == plain["output_ids"]
        text, last = text + answer["output_ids"], answer["meta_info"]["id"]
    engine.close_session(session)


def test_more_requests_than_fit_at_once(engine, prompts, expected):
    """Queueing, and decode batches whose rows come and go."""
    many = prompts * 8
    lengths = [1 + i % NEW_TOKENS for i in range(len(many))]
    outputs = engine.generate(
        input_ids=many, sampling_params=[GREEDY | {"max_new_tokens": n} for n in lengths]
    )
    wanted = [tokens[:n] for tokens, n in zip(expected * 8, lengths, strict=True)]
    assert [output["output_ids"] for output in outputs] == wanted


@pytest.mark.slow
def test_two_ranks_give_one_ranks_tokens(checkpoint, prompts, expected, monkeypatch):
    """Tensor parallelism over gloo, with nothing set by the user."""
    import sglang

    # Two ranks on shared cores: one thread each. Set first, so that what the platform adds to the
    # environment of this process goes away with the test.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_NCCL_SO_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ranks = sglang.Engine(model_path=checkpoint, tp_size=2, **ENGINE_DEFAULTS)
    try:
        outputs = ranks.generate(input_ids=prompts, sampling_params=GREEDY)
    finally:
        ranks.shutdown()
    assert [output["output_ids"] for output in outputs] == expected
