"""Targets and drafts in 8 bits are dequantized as they are loaded: the shipped pair, by format."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import prompt_ids
from in_process import Reply, Server
from operator_client import tensors_of
from pair.task import held_out
from quantized_models import quantized, stood_for
from sglang.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from tiny_models import smc_arguments
from transformers import LlamaForCausalLM

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET = PAIR / "target"
MODEL = PAIR / "draft"
HEAD = PAIR / "eagle3"
SERVER: dict[str, Any] = {"num_particles": 4, "num_steps": 4, "mode": "exact"}
PROMPTS = [prompt_ids(held_out(index)) for index in range(4)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 32}
#: Of the tokens a pass that the same draft has beside the target in 16 bits.
LEAST_KEPT = 0.85
#: Formats whose weights and names the others have between them.
RARE = ("int8 blocks", "compressed fp8")


def answers(server: Server) -> list[Reply]:
    asked = {"return_logprob": True, "sampling_params": GREEDY}
    return server.play([{"input_ids": prompt, **asked} for prompt in PROMPTS], every=0)


def tokens_a_pass(replies: list[Reply]) -> float:
    passes = sum(one.meta["spec_verify_ct"] for one in replies)
    return sum(len(one.output_ids) for one in replies) / passes


@pytest.fixture(scope="module")
def in_16_bits(start: Callable[..., Server]) -> dict[Path, float]:
    """Tokens a pass of each draft beside the target as it is shipped."""
    return {
        draft: tokens_a_pass(answers(start(**smc_arguments(str(TARGET), str(draft), **SERVER))))
        for draft in (MODEL, HEAD)
    }


@torch.inference_mode()
def assert_texts_of(model: str, replies: list[Reply]) -> None:
    """Each token is the likeliest of plain weights in transformers, as likely as it is said."""
    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        logits = plain(torch.tensor([[*prompt, *reply.output_ids]])).logits[0]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].max(-1)
        assert chosen.indices.tolist() == reply.output_ids
        assert reply.logprobs == pytest.approx(chosen.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        *("fp8", "fp8 blocks", "int8", "compressed int8", "modelopt"),
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in RARE),
    ],
)
def test_texts_and_logits_are_those_of_the_weights_it_stands_for(
    start: Callable[..., Server], in_16_bits: dict[Path, float], kind: str, tmp_path: Path
) -> None:
    """Red where a scale is of another row, block, tensor or file, or a head reads other states."""
    target = quantized(TARGET, tmp_path / "target", kind)
    found = answers(start(**smc_arguments(target, str(HEAD), **SERVER)))
    assert_texts_of(stood_for(TARGET, tmp_path / "plain", kind), found)
    assert tokens_a_pass(found) > LEAST_KEPT * in_16_bits[HEAD]


@pytest.mark.parametrize(("kind", "draft"), [("fp8", MODEL), ("compressed int8", HEAD)])
def test_a_draft_may_be_in_8_bits_too(
    start: Callable[..., Server],
    in_16_bits: dict[Path, float],
    kind: str,
    draft: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The text is that of plain decoding by the same checkpoint, and each model is told of once."""
    caplog.set_level(logging.INFO, "sglang_smc.cpu.quantized")
    target = quantized(TARGET, tmp_path / "target", kind)
    small = quantized(draft, tmp_path / "draft", kind)
    found = answers(start(**smc_arguments(target, small, **SERVER)))
    told = [line for line in caplog.messages if "are dequantized to torch.float32" in line]
    assert [name for name in (target, small) for line in told if f"of {name} " in line] == [
        target,
        small,
    ]
    assert tokens_a_pass(found) > LEAST_KEPT * in_16_bits[draft]
    plain = answers(start(model_path=target))
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]
    for one, other in zip(found, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_new_weights_in_8_bits_are_dequantized(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """Red where an update copies 8-bit numbers without their scales, of a file or as sent."""
    target = quantized(TARGET, tmp_path / "target", "fp8 blocks")
    server = start(**smc_arguments(target, str(MODEL), **SERVER))
    before = answers(server)
    update = UpdateWeightFromDiskReqInput(model_path=target, load_format="auto")
    assert server.ask(update).success
    sent = MultiprocessingSerializer.serialize(list(tensors_of(target).items()))
    refused = server.ask(UpdateWeightsFromTensorReqInput(serialized_named_tensors=[sent]))
    assert not refused.success
    assert "dequantizes weights of files alone" in refused.message
    assert [one.output_ids for one in answers(server)] == [one.output_ids for one in before]
