"""Requests that change logits, and what SGLang makes of them."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from table_entries import NEUTRAL


class Echo(CustomLogitProcessor):
    """Prefers the token of two before, in prompt and output."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            request = params["__req__"]
            row[[*request.origin_input_ids, *request.output_ids][-2]] += 1.5
        return logits


class Slow(CustomLogitProcessor):
    """Changes nothing, and takes half a second to do so."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        time.sleep(0.5)
        return logits


def stock_edit(
    logits: torch.Tensor, output_ids: list[int], params: dict[str, Any], stop_tokens: frozenset[int]
) -> torch.Tensor:
    """Logits ``[V]`` after SGLang's own penalties and biases, for a request with this output."""
    asked = {**NEUTRAL, "stop_token_ids": set(stop_tokens), **params}
    tokenizer = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(**asked), tokenizer=tokenizer, eos_token_ids=None
    )
    batch: Any = mock.Mock(reqs=[req], device="cpu")  # which penalizers hold by a weak reference
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=len(logits),
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )
    for token in output_ids:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    one = torch.ones(1)
    info = SamplingBatchInfo(
        *(one, one, one, one),
        *(False, False, False, False, False),
        vocab_size=len(logits),
        penalizer_orchestrator=orchestrator,
        logit_bias=_dense(params.get("logit_bias"), len(logits)),
        device="cpu",
    )
    row = logits.clone().unsqueeze(0)
    info.copy_for_forward().apply_logits_bias(row)
    return row[0]


def _dense(bias: dict[str, float] | None, vocab_size: int) -> torch.Tensor | None:
    """As `SamplingBatchInfo.from_schedule_batch` spells it out."""
    if bias is None:
        return None
    row = torch.zeros(1, vocab_size)
    row[0, [int(token) for token in bias]] = torch.tensor(list(bias.values()))
    return row
