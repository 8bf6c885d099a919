"""Pairs whose logits differ by padding, as Qwen2.5's do, through real engines.

The tiny models give their padding as much weight as any token. So the target draws ids there that
the draft has no embedding for, and the draft has weight on ids that the target lacks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from laws import NextProbs, Sequence, enumerate_law, next_probs, p_value
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ALPHA = 1e-4  # by chance once in ten thousand runs of one comparison
SIZE = 2000
NUM_TOKENS, EOS = 4, 1
PROMPT = [3, 2, 3]


class Pair(NamedTuple):
    target: str
    draft: str
    padding: int  # of the target; the other has as much where this one has none
    engine: Any


@pytest.fixture(params=[3, 0])
def pair(
    request: pytest.FixtureRequest, engine: Callable[..., Any], tiny: Callable[..., str]
) -> Pair:
    model = {"vocab_size": NUM_TOKENS, "scale": 0.5}
    target = tiny(seed=1, padding=request.param, **model)
    draft = tiny(seed=2, padding=3 - request.param, **model)
    room = {"max_running_requests": 128, "max_total_tokens": 60_000, "max_lag": 16}
    running = engine(**smc_arguments(target, draft, num_particles=4, num_steps=2, **room))
    return Pair(target, draft, request.param, running)


def draw(engine: Any, **smc: Any) -> list[Sequence]:
    """Independent outputs for one prompt."""
    own = {"max_new_tokens": 4, "custom_params": {"smc": smc}}
    answers = engine.generate(
        input_ids=[PROMPT] * SIZE,
        sampling_params=[{"sampling_seed": seed, **own} for seed in range(SIZE)],
    )
    return [tuple(answer["output_ids"]) for answer in answers]


def test_the_law_is_the_targets(pair: Pair) -> None:
    """With its padding: what is never drafted comes out as often as the target has it."""
    p = next_probs(pair.target, PROMPT)
    outputs = draw(pair.engine, mode="exact")
    assert p_value(outputs, enumerate_law(4, EOS, lambda _: p)) > ALPHA
    beyond = any(token >= NUM_TOKENS for output in outputs for token in output)
    assert beyond == bool(pair.padding)


def test_what_is_drafted_is_the_drafts_law_of_their_common_ids(pair: Pair) -> None:
    """One particle keeps it as it is: prefill, two drafts and a bonus, then a draft."""
    p, q = next_probs(pair.target, PROMPT), common(pair.draft)
    outputs = draw(pair.engine, num_particles=1, evidence_threshold=0)
    law = enumerate_law(4, EOS, lambda position: p if position % 3 == 0 else q)
    assert p_value(outputs, law) > ALPHA


def common(draft: str) -> NextProbs:
    """The draft's distribution, of what tokens the tokenizer has.

    An id that the draft has no embedding for it reads as its last.
    """
    own = next_probs(draft, PROMPT)

    def probs(output: Sequence) -> torch.Tensor:
        found = own(tuple(min(token, NUM_TOKENS - 1) for token in output))[:NUM_TOKENS]
        return found / found.sum()

    return probs


def test_the_text_is_the_targets_own(pair: Pair) -> None:
    last = NUM_TOKENS + pair.padding - 1  # padding, if there is any
    prompts = [[2], [3, 2], [2, last], [last, 2, 3, 2], [3, 3, 2, 2, 3, last, 3]]
    expected = [likeliest(pair.target, prompt, 40) for prompt in prompts]
    found = pair.engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 40}
    )
    assert [answer["output_ids"] for answer in found] == expected
    assert max(map(len, expected)) > 15  # all of these end by themselves


def likeliest(model: str, prompt: list[int], num_tokens: int) -> list[int]:
    """A continuation by transformers; its own ``generate`` would mask padding in a prompt."""
    probs = next_probs(model, prompt)
    output: Sequence = ()
    while len(output) < num_tokens and EOS not in output:
        output = (*output, int(probs(output).argmax()))
    return list(output)
