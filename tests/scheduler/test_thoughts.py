"""Thoughts are the answer's own tokens, up to the end of the thought."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Server
from sglang.srt.runtime_context import get_serving
from tiny_models import make_tiny_model, smc_arguments, tiny_tokenizer

VOCAB = 64
THINK_END = VOCAB - 1
SMC: list[dict[str, Any]] = [
    {},
    {"mode": "exact"},
    {"mode": "auto"},
    {"power": 2.0},  # its first token is open: it may be the thought's end, and change
    {"num_steps": 0},
]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft whose tokenizer has the marks of a thought."""
    paths: list[str] = []
    for seed in (1, 2):
        path: Path = tmp_path_factory.mktemp(f"thinking-{seed}")
        paths.append(make_tiny_model(path, vocab_size=VOCAB, scale=0.3, seed=seed))
        tiny_tokenizer(VOCAB, 1, ("<think>", "</think>")).save_pretrained(path)
    return paths[0], paths[1]


def server_of(start: Callable[..., Server], thinking: tuple[str, str], **more: Any) -> Server:
    sizes = {"num_particles": 4, "num_steps": 4, "max_lag": 16, "max_total_tokens": 8000}
    return start(**smc_arguments(*thinking, reasoning_parser="qwen3", **sizes, **more))


def asked(index: int, smc: dict[str, Any], **params: Any) -> dict[str, Any]:
    own = {"ignore_eos": True, "sampling_seed": index, "logit_bias": {str(THINK_END): 2.5}}
    own |= {"custom_params": {"smc": smc}, **params}
    return {"input_ids": [3, 4, 5 + index % 40], "sampling_params": own, "require_reasoning": True}


def test_a_thought_ends_with_its_answer(
    start: Callable[..., Server], thinking: tuple[str, str]
) -> None:
    """At each length, and at stop strings; red if tokens that are cut are counted with it."""
    server = server_of(start, thinking, overlap=True)
    requests = [asked(size, SMC[size % len(SMC)], max_new_tokens=size) for size in range(1, 41)]
    for which, smc in enumerate(SMC * 8):
        stop = [f"t{which}", f"t{which + 20}"]
        requests.append(asked(which, smc, max_new_tokens=40, stop=stop))
    num_cut = 0
    for reply in server.play(requests, every=0):
        ids = reply.output_ids
        num_thought = ids.index(THINK_END) + 1 if THINK_END in ids else len(ids)
        assert reply.meta["reasoning_tokens"] == num_thought, reply.rid
        num_cut += THINK_END not in ids
    assert 20 < num_cut < 60


def test_thoughts_leave_the_cache(start: Callable[..., Server], thinking: tuple[str, str]) -> None:
    """With --strip-thinking-cache a turn finds the prompts before it, and no answer."""
    server = server_of(start, thinking, overlap=True, strip_thinking_cache=True)
    assert get_serving().strip_thinking_cache
    for index, smc in enumerate(SMC):
        prompt = [6 + index, *range(20, 28)]
        cached = 0
        for turn in range(6):
            body = asked(index + turn, smc, max_new_tokens=9)
            (reply,) = server.play([{**body, "input_ids": prompt}])
            assert reply.meta["cached_tokens"] == cached
            cached = len(prompt)
            prompt = [*prompt, *reply.output_ids, 30 + turn]
    server.flush()
