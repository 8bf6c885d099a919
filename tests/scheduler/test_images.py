"""Answers to images at temperature 0 are those of SGLang without speculation, in all modes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Reply, Server
from model_families import make_family
from seen_images import MODES, add_processor, params_of, questions, read, with_names
from tiny_models import smc_arguments

# Images are read in pieces.
COMMON: dict[str, Any] = {"enable_multimodal": True, "chunked_prefill_size": 16}


def play(server: Server, family: str, times: int, retracted: slice = slice(0)) -> list[Reply]:
    """Ask all questions ``times``, at once; some answers are ``retracted`` on their way."""
    prompts = [read(server.scheduler, *one) for one in questions(family)] * times
    replies = [
        server.send(**prompt, sampling_params=params_of(i), return_logprob=True)
        for i, prompt in enumerate(prompts)
    ]
    server.retract(*replies[retracted])
    server.finish()
    return replies


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("gemma3", "gemma3"),
        ("mistral3", "llama"),
        ("qwen2_vl", "qwen2_vl"),
        ("qwen2_5_vl", "qwen2"),
        ("qwen3_vl", "mistral3"),
    ],
)
def test_images_are_seen_as_without_speculation(
    start: Callable[..., Server], tmp_path: Path, target: str, draft: str
) -> None:
    """A draft model, the target itself too, reads a token in the place of an image."""
    path = make_family(tmp_path / "target", target, seed=3)
    add_processor(path, target)
    of_draft = path
    if draft != target:
        of_draft = make_family(tmp_path / "draft", draft, seed=2)
        with_names(target).save_pretrained(of_draft)
    plain = play(start(model_path=path, **COMMON), target, 1)
    sizes = {"num_particles": 4, "num_steps": 3, "max_lag": 16}
    server = start(**smc_arguments(path, of_draft, **sizes, **COMMON), overlap=True)
    replies = play(server, target, len(MODES), slice(1, None, 5))
    for reply, wanted in zip(replies, plain * len(MODES), strict=True):
        assert reply.output_ids == wanted.output_ids
        assert reply.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    one, other = plain[:2]
    assert one.logprobs != pytest.approx(other.logprobs, abs=1e-2), "no image is seen"
    assert any(reply.num_retractions for reply in replies)
    assert max(reply.meta["cached_tokens"] for reply in replies) > 16
