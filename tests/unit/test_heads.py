"""Heads as drafts: which are taken, what they share with the target, and what their laws become."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from sglang_smc.models import head_kinds as kinds
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.assembly import load_own
from sglang_smc.proposers.eagle3 import spread

PARTIAL = SMCConfig(drafts_all=False)


def model_config(config: Any) -> Any:
    return SimpleNamespace(
        hf_config=config,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        model_path=str(config.architectures),
    )


TARGET = model_config(LlamaConfig(hidden_size=64, vocab_size=100, num_hidden_layers=6))


def eagle3(**more: Any) -> Any:
    sizes = {"hidden_size": 64, "vocab_size": 100, "draft_vocab_size": 32}
    given = {"architectures": [kinds.EAGLE3], "num_hidden_layers": 1, **sizes}
    made = LlamaConfig(**{**given, **more})
    if made.draft_vocab_size is None:
        del made.draft_vocab_size
    return model_config(made)


def dflash(block_size: int = 9, hidden_size: int = 64, **own: Any) -> Any:
    made = Qwen3Config(hidden_size=hidden_size, vocab_size=100, num_hidden_layers=2)
    made.architectures, made.block_size = [kinds.DFLASH], block_size
    made.dflash_config = {"mask_token_id": 3, "target_layer_ids": [0, 2, 4], **own}
    return model_config(made)


def test_what_fits_is_taken() -> None:
    for config, kind in ((eagle3(), "eagle3"), (dflash(), "dflash"), (TARGET, "model")):
        assert kinds.kind_of(config) == kind
        assert list(kinds.problems(config, TARGET, num_steps=8)) == []


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (eagle3(draft_vocab_size=None), "has no draft_vocab_size"),
        (eagle3(hidden_size=32), "reads states of width 32, and the target's have 64"),
        (eagle3(target_hidden_size=64, hidden_size=32), "has width 32, and the target 64"),
        (eagle3(vocab_size=99), "has vocab_size 99, and the target 100"),
        (
            eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}),
            r"reads what layers \[5\] of the target pass on; it gives out those of 0 to 4",
        ),
        (eagle3(eagle_config={"use_aux_hidden_state": False}), "reads the last layer alone"),
        (dflash(block_size=8), "drafts blocks of 7 tokens, and --speculative-num-steps is 8"),
        (dflash(hidden_size=32), "reads states of width 32"),
        (dflash(mask_token_id=None), "has no mask_token_id"),
        (dflash(mask_token_id=100), "has mask_token_id 100"),
        (dflash(target_layer_ids=[0, 9]), "cannot read the target's states: .*out-of-range"),
        (dflash(conv_kernel_size=3, conv_group_size=8), "is a block head with convolutions"),
        (eagle3(architectures=["LlamaForCausalLMEagle"]), "is an EAGLE head of the first or"),
        (eagle3(architectures=["Qwen3NextForCausalLMMTP"]), "is an MTP layer of a kind that"),
        (eagle3(architectures=["MiMoMTP"]), "is an MTP layer in a checkpoint of its own"),
        (eagle3(architectures=["DFlash2DraftModel"]), "is a block head of a kind that walks"),
    ],
)
def test_what_does_not_fit_is_told(config: Any, told: str) -> None:
    (found,) = kinds.problems(config, TARGET, num_steps=8)
    assert re.search(told, found)


WEIGHED = "knows a part of the vocabulary alone"


@pytest.mark.parametrize(
    ("smc", "constrained", "refused"),
    [
        ({"evidence_threshold": 0}, False, WEIGHED),
        ({"power": 2.0}, False, WEIGHED),
        ({"evidence_threshold": 0, "num_particles": 1}, False, WEIGHED),
        ({"proposal": "draft"}, True, "with a grammar, which keeps whole blocks"),
        ({}, True, None),
        ({"mode": "mixed"}, True, None),
        ({}, False, None),
        ({"evidence_threshold": 0.1}, False, None),
        ({"mode": "exact"}, False, None),
        ({"tilt": 0.1}, False, None),
    ],
)
def test_weights_alone_are_refused_beside_a_part_of_the_vocabulary(
    smc: dict[str, Any], constrained: bool, refused: str | None
) -> None:
    request_config(SMCConfig(), {"smc": smc}, constrained=constrained)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        request_config(PARTIAL, {"smc": smc}, constrained=constrained)


def test_hot_tokens_get_their_places_and_others_nothing() -> None:
    logits = torch.tensor([[[1.0, 2.0]]])
    found = spread(logits, torch.tensor([3, 0]), 4)
    assert found.tolist() == [[[2.0, -torch.inf, -torch.inf, 1.0]]]
    assert spread(logits, None, 3).tolist() == [[[1.0, 2.0, -torch.inf]]]
    assert spread(logits, None, 2) is logits


def test_new_weights_of_a_head_leave_the_targets_alone() -> None:
    """And its list of hot tokens is changed where rounds read it."""
    hot, loaded = torch.tensor([1, 2]), []
    head = SimpleNamespace(hot_token_id=hot)

    def load(weights: Any) -> None:
        loaded.extend(name for name, _ in weights)
        head.hot_token_id = torch.tensor([4, 5])

    names = ["embed_tokens.weight", "fc.weight", "model.embed_tokens.weight", "lm_head.weight"]
    weights = [(name, torch.zeros(1)) for name in names]
    load_own(head, load, ("embed_tokens.weight",), weights)
    assert loaded == ["fc.weight", "lm_head.weight"]
    assert head.hot_token_id is hot
    assert hot.tolist() == [4, 5]
