"""Requests that change logits, and what SGLang makes of them."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from table_entries import NEUTRAL, entry
from toy_request import begun

from sglang_smc.rules.registry import TextRules
from sglang_smc.smc.edits import Edits, edit_logits
from sglang_smc.state.edits import EditTable
from sglang_smc.state.population import Population
from sglang_smc.state.settings import RequestTable


class Echo(CustomLogitProcessor):
    """Prefers the token of two before, in prompt and output."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            request = params["__req__"]
            row[[*request.origin_input_ids, *request.output_ids][-2]] += 1.5
        return logits


def make_req(output_ids: list[int], **params: Any) -> Any:
    """A request that has been begun; ``params`` are sampling parameters."""
    return begun({}, output_ids, **params)


def begin_rules(reqs: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """First tokens' logits ``[G, V]`` as the rules of the requests leave them."""
    rows = logits.clone().view(len(reqs), 1, 1, -1)
    nothing = torch.empty(len(reqs), 1, 0, dtype=torch.int64)
    of_texts = TextRules.begin(reqs, logits.shape[1], "cpu")
    return of_texts.apply(rows, nothing, 0)[0].view_as(logits)


def rules_of(reqs: list[Any], population: Population | None, vocab_size: int) -> TextRules:
    """The rules of a round of begun requests."""
    return TextRules.of(reqs, population, vocab_size, "cpu")


class EditedRequests:
    """Requests in rows 1, 2, ... of a server's tables, begun behind the outputs that they have.

    Each ends with ``stop_tokens``.
    """

    def __init__(
        self,
        reqs: list[Any],
        vocab_size: int,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        rows = list(range(1, 1 + len(reqs)))
        settings = RequestTable(1 + len(rows), vocab_size, "cpu")
        self.table = EditTable(1 + len(rows), vocab_size, "cpu")
        self.rows = torch.tensor(rows)
        least = (req.sampling_params.min_new_tokens for req in reqs)
        settings.write(
            [
                entry(row, stop_tokens=stop_tokens, min_new_tokens=few)
                for row, few in zip(rows, least, strict=True)
            ]
        )
        self.settings = settings.gather(self.rows)
        self.num_emitted = torch.tensor([len(req.output_ids) for req in reqs])
        self.reqs = reqs
        self.table.begin(reqs, rows)

    def begin(self, row: int, req: Any) -> None:
        """Let another request have a row."""
        self.reqs = [req if row == own else old for own, old in enumerate(self.reqs, start=1)]
        self.table.begin([req], [row])

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """First tokens' logits ``[G, V]`` as they are edited; the argument may change."""
        edits = self.table.of_prefill(self.reqs, self.rows, self.settings, self.num_emitted)
        rows, nothing = logits[:, None, None], self.num_emitted[:, None, None, None][:, :, 0, :0]
        edit_logits(rows, edits, nothing, 0)
        return rows[:, 0, 0]

    def of_round(self, population: Population) -> Edits:
        """Edits of a round that begins with these particles."""
        return self.table.of_round(self.reqs, self.rows, self.settings, population)


def stock_edit(
    logits: torch.Tensor,
    output_ids: list[int],
    params: dict[str, Any],
    stop_tokens: frozenset[int],
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
    with torch.compiler.set_stance("force_eager"):
        info.copy_for_forward().apply_logits_bias(row)
    return row[0]


def _dense(bias: dict[str, float] | None, vocab_size: int) -> torch.Tensor | None:
    """As `SamplingBatchInfo.from_schedule_batch` spells it out."""
    if bias is None:
        return None
    row = torch.zeros(1, vocab_size)
    row[0, [int(token) for token in bias]] = torch.tensor(list(bias.values()))
    return row
