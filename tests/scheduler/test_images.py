"""Answers to images at temperature 0 are those of SGLang without speculation, in all modes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from head_laws import EAGLE3, make_head
from in_process import Reply, Server
from model_families import CONFIGS, make_family
from seen_images import MODES, add_processor, params_of, questions, read, with_names
from tiny_models import smc_arguments

# Images are read in pieces.
COMMON: dict[str, Any] = {
    "enable_multimodal": True,
    "chunked_prefill_size": 16,
    "context_length": 512,
}
#: Words behind images, whose rotary positions are not their places.
FAR = 300
LAYERS = 4  # of which EAGLE-3 reads three


def make_draft(path: Path, target: str, family: str, draft: str) -> str:
    """Save a draft of a kind for a target of images; the target's own kind is the target."""
    if draft == family:
        return target
    if draft == EAGLE3:  # heads are trained on models of text
        text = make_family(path.with_name("text"), "qwen3", num_hidden_layers=LAYERS)
        return make_head(EAGLE3, text, path)
    made = make_family(path, draft, seed=2)
    with_names(family).save_pretrained(made)
    return made


def play(
    server: Server, family: str, behind: int, times: int, retracted: slice = slice(0)
) -> list[Reply]:
    """Ask all questions ``times``, at once; some answers are ``retracted`` on their way."""
    prompts = [read(server.scheduler, *one) for one in questions(family, behind)] * times
    replies = [
        server.send(**prompt, sampling_params=params_of(i), return_logprob=True)
        for i, prompt in enumerate(prompts)
    ]
    server.retract(*replies[retracted])
    server.finish()
    return replies


@pytest.mark.parametrize(
    ("target", "draft", "behind"),
    [
        ("gemma3", "gemma3", 0),
        ("mistral3", "llama", 0),
        ("qwen2_vl", "qwen2_vl", FAR),
        ("qwen2_5_vl", "qwen2", 0),
        ("qwen2_5_vl", EAGLE3, FAR),
        ("qwen3_vl", "mistral3", 0),
    ],
)
def test_images_are_seen_as_without_speculation(
    start: Callable[..., Server], tmp_path: Path, target: str, draft: str, behind: int
) -> None:
    """A draft model, the target itself too, reads a token in the place of an image.

    Red where rounds are at other rotary positions than the prompt, of the target or of the draft.
    """
    layers = {"num_hidden_layers": LAYERS} if draft == EAGLE3 else {}
    text = CONFIGS[target]["text_config"] | layers
    path = make_family(tmp_path / "target", target, seed=3, text_config=text)
    add_processor(path, target)
    of_draft = make_draft(tmp_path / "draft", path, target, draft)
    plain = play(start(model_path=path, **COMMON), target, behind, 1)
    sizes = {"num_particles": 4, "num_steps": 3, "max_lag": 16}
    server = start(**smc_arguments(path, of_draft, **sizes, **COMMON), overlap=True)
    replies = play(server, target, behind, len(MODES), slice(1, None, 5))
    for reply, wanted in zip(replies, plain * len(MODES), strict=True):
        assert reply.output_ids == wanted.output_ids
        assert reply.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    one, other = plain[:2]
    assert one.logprobs != pytest.approx(other.logprobs, abs=1e-2), "no image is seen"
    assert any(reply.num_retractions for reply in replies)
    assert max(reply.meta["cached_tokens"] for reply in replies) > 16
    if behind and draft == target:  # what it reads at one position it reads there in rounds
        of_both = replies[3 :: len(plain)]
        assert min(reply.meta["spec_num_correct_drafts"] for reply in of_both) > 5
