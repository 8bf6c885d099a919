"""A draft model whose LM head is cut to frequent tokens, before and after new weights.

Texts and evidence are those of rounds over transformers, whose draft has no mass on other tokens:
whatever row of the LM head is another token's, or of former weights, changes them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_rounds import CheckpointRounds, check
from in_process import SMC, Server
from model_families import make_model
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from tiny_models import smc_arguments

HOT = [63, 1, *range(40, 8, -1)]
SETTINGS = {"num_particles": 3, "num_steps": 3, "max_lag": 16}
PROMPTS = [[5 + seed, *range(2, 2 + 3 * seed)] for seed in range(2 * len(SMC))]
PARAMS = [
    {
        "temperature": 1.0,
        "max_new_tokens": 12,
        "sampling_seed": seed,
        "custom_params": {"smc": SMC[seed % len(SMC)]},
    }
    for seed in range(len(PROMPTS))
]


def assert_answers(server: Server, target: str, draft: str) -> None:
    settings = SETTINGS | {"drafts_all": False}
    rounds = CheckpointRounds(target, draft, settings, len(PROMPTS), hot=HOT)
    sent = [
        {"input_ids": prompt, "sampling_params": params}
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    replies = server.play(sent, every=0)
    none = dict.fromkeys(
        ("spec_smc_log_evidence", "spec_smc_watched_ct")
    )  # of none there is no word
    answers = [
        {"output_ids": reply.output_ids, "meta_info": none | reply.meta} for reply in replies
    ]
    assert check(answers, rounds.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def cut_rows(server: Server) -> torch.Tensor:
    """Return the weights that the draft's logits processor is given."""
    model = server.scheduler.draft_worker.draft_worker.model_runner.model
    (processor,) = (each for each in model.modules() if isinstance(each, LogitsProcessor))
    (hook,) = processor._forward_pre_hooks.values()
    return hook(processor, (None, None, model.lm_head))[2].weight


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # an LM head of its own, a tied one
def test_only_frequent_tokens_are_drafted_with_the_weights_of_now(
    start: Callable[..., Server], tmp_path: Path, family: str
) -> None:
    target, draft, new = (
        make_model(tmp_path / f"{seed}", kind, seed)
        for seed, kind in enumerate(("llama", family, family))
    )
    torch.save(HOT, tmp_path / "map.pt")
    given = {**SETTINGS, "speculative_token_map": str(tmp_path / "map.pt")}
    server = start(**smc_arguments(target, draft, **given), overlap=True)
    assert_answers(server, target, draft)
    rows = cut_rows(server)
    address = rows.data_ptr()
    update = {"model_path": target, "manifest": {"draft_model_path": new}, "load_format": "auto"}
    assert server.ask(UpdateWeightFromDiskReqInput(**update)).success
    assert_answers(server, target, new)
    assert (rows.shape[0], rows.data_ptr()) == (len(HOT), address), "captured rounds read it"
