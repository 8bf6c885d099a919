"""Published shapes serve: small random pairs with published keys, in SGLang's scheduler.

In bfloat16, at the configurations' own context. Greedy texts are those without drafts, but where
two tokens are as likely as rounding can tell.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Reply, Server
from tiny_models import smc_arguments
from zoo_small import make_head, make_model_draft, make_target

from sglang_smc import upstream

TIE = 0.1  # nats between tokens that bfloat16 may order either way
NUM_TOKENS = 16
PROMPTS = [[7, 5, 3], [7, *range(2, 50)]]  # within each window, and beyond
NIGHTLY = pytest.mark.nightly

#: Families of targets, targets and heads. Nightly are those of which every key is another's, too.
SHAPES = [
    ("llama", "llama31-8b", "llama31-8b+lmsys-eagle3"),
    ("qwen3", "qwen3-8b", "qwen3-8b+deepspec"),
    ("qwen3", "qwen3-8b", "qwen3-8b+specforge-dspark"),
    ("qwen3", "qwen3-8b", "qwen3-8b+specforge-domino"),
    ("qwen3_moe", "qwen3-235b-2507", "qwen3-235b-2507+window-eagle3"),
    ("qwen3_moe", "qwen3-30b", "qwen3-30b+specforge-3.1"),
    ("qwen3_5_text", "qwen3.5-27b", "qwen3.8-27b+dflash2"),
    ("qwen3_5_moe_text", "qwen3.6-35b", "qwen3.6-35b+redhat-dspark"),
    ("qwen3_5_moe_text", "qwen3.6-35b", "qwen3.6-35b+ornith-dspark"),
    ("deepseek_v3", "deepseek-v3", "deepseek-v3+specforge"),
    ("llama", "llama31-8b", "gpt-oss-20b+redhat"),  # whose own target starts on no CPU
    pytest.param("qwen3", "qwen3-8b", "qwen3-8b+angelslim", marks=NIGHTLY),
    pytest.param("qwen3", "qwen3-8b", "qwen3-8b+window-eagle3", marks=NIGHTLY),
    pytest.param("llama", "llama32-3b", "llama32-3b+dspark", marks=NIGHTLY),
    pytest.param("llama", "llama33-70b", "llama33-70b+specforge", marks=NIGHTLY),
    pytest.param("qwen3", "qwen3-8b-yarn", "qwen3-8b+specforge-eagle3", marks=NIGHTLY),
    pytest.param("qwen3_moe", "qwen3-30b-2507", "qwen3-30b-2507+redhat-like", marks=NIGHTLY),
]
DRAFT_MODELS = [
    ("gemma3_text", "gemma3-4b", "gemma3-4b+270m"),
    ("qwen3", "qwen3-8b", "qwen3-8b+fp16-0.6b"),
]


@pytest.mark.parametrize(("family", "target", "head"), SHAPES)
def test_a_published_head_serves(
    family: str, target: str, head: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    """Red where a key of its configuration is misread, or its layers yield NaN."""
    if family.startswith("qwen3_5") and not upstream.IS_NEWEST:
        pytest.skip("recurrent targets run on 0.5.23 and later")
    pair = make_target(family, target, tmp_path / "target"), make_head(head, tmp_path / "head")
    drafts_as_without(start(**arguments(*pair, disable_radix_cache=family.startswith("qwen3_5"))))


@pytest.mark.parametrize(("family", "target", "draft"), DRAFT_MODELS)
def test_a_published_draft_model_serves(
    family: str, target: str, draft: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    own = make_model_draft(family, draft, tmp_path / "draft")
    drafts_as_without(start(**arguments(make_target(family, target, tmp_path / "target"), own)))


def arguments(target: str, draft: str, **more: Any) -> dict[str, Any]:
    """At the models' own context, dtype and K."""
    own = {"dtype": "bfloat16", "context_length": None, "speculative_num_steps": None}
    return smc_arguments(target, draft, num_particles=2, **own, **more)


def drafts_as_without(server: Server) -> None:
    asked = [
        greedy(prompt, mode) for mode in ({"num_steps": 0}, {"mode": "exact"}) for prompt in PROMPTS
    ]
    replies = server.play(asked, every=0)
    for plain, found in zip(replies[: len(PROMPTS)], replies[len(PROMPTS) :], strict=True):
        assert all(map(math.isfinite, found.logprobs)) and len(found.output_ids) == NUM_TOKENS
        assert_same_up_to_a_tie(found, plain)


def greedy(prompt: list[int], settings: dict[str, Any]) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    params["custom_params"] = {"smc": settings}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True}


def assert_same_up_to_a_tie(found: Reply, plain: Reply) -> None:
    """The same tokens, up to the first that bfloat16 leaves undecided."""
    pairs = zip(found.output_ids, plain.output_ids, strict=True)
    other = next((place for place, (own, known) in enumerate(pairs) if own != known), None)
    if other is not None:
        assert found.logprobs[other] == pytest.approx(plain.logprobs[other], abs=TIE)
