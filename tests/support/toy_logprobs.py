"""A toy worker whose requests ask for log-probabilities, and SGLang's books of them."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor as Books,
)
from toy_worker import ToyRequest, ToyWorker

from sglang_smc.kv.transfer import each_tensor
from sglang_smc.round.logprobs import deliver
from sglang_smc.state.stream import set_logprob
from sglang_smc.state.texts import has_open_token

Shown = tuple[int, list[int] | None] | None
"""How many of the likeliest tokens, and which tokens of its own; None asks for nothing."""


class AskingWorker(ToyWorker):
    """Row r is shown ``shown[(r - 1) % len(shown)]``."""

    def __init__(self, *args: Any, shown: tuple[Shown, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown = shown
        self.begun: list[Any] = []

    def make_request(self, row: int) -> ToyRequest:
        req = super().make_request(row)
        shown = self.shown[(row - 1) % len(self.shown)]
        num_top, ids = shown or (0, None)
        req.return_logprob = shown is not None
        names = [name for name in ReqLogprob.__dataclass_fields__ if name.startswith("output_")]
        lists: dict[str, Any] = {name: [] for name in names}
        req.logprob = ReqLogprob(top_logprobs_num=num_top, token_ids_logprob=ids, **lists)
        return req

    def begin(self, rows: list[int]) -> list[Any]:
        reqs = super().begin(rows)
        output = self.first_output
        Books.move_logprobs_to_cpu(None, batch=self.batch(reqs), logits_output=output)  # type: ignore[arg-type]
        for i, req in enumerate(reqs):
            if req.return_logprob:
                _first(req.logprob, i, req.output_ids[0], output)
        self.begun += reqs
        return reqs

    def batch(self, reqs: list[Any]) -> Any:
        batch = super().batch(reqs)
        batch.return_logprob = True
        batch.spec_algorithm = SimpleNamespace(is_none=lambda: False)
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
        return batch

    def play_round(self, reqs: list[ToyRequest]) -> Any:
        """A round, and what it says of its tokens into the books, as SGLang itself reads it."""
        result = super().play_round(reqs)
        if "return_logprob" not in result.outcome.extras:
            assert not any(req.return_logprob for req in reqs)
            return result
        tokens = result.next_token_ids.view(len(reqs), -1)
        counts = result.accept_lens.tolist()
        output = result.logits_output
        settled = result.outcome.extras["return_logprob"]
        tails = each_tensor(torch.Tensor.cpu, settled.tails)
        deliver(output, tails, counts, reqs)  # type: ignore[arg-type]
        batch = self.batch(reqs)
        emitted = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
        books: Any = SimpleNamespace(_resolve_spec_v2_tokens=lambda *_: emitted)
        own, logprobs = Books._normalize_decode_outputs(
            books, batch=batch, result=result, logits_output=output, next_token_ids=tokens
        )
        for i, req in enumerate(reqs):
            if not req.return_logprob:
                continue
            if has_open_token(req) and result.outcome.first_tokens[i] >= 0:
                set_logprob(req, 0, int(result.outcome.first_tokens[i]), float(settled.first[i]))
            of_req = {"i": i, "req": req, "batch": batch, "logits_output": output}
            of_token = {"next_token_id": own[i], "next_token_logprobs": logprobs}
            Books._apply_decode_logprobs(None, **of_req, **of_token)  # type: ignore[arg-type]
        return result


def _first(books: Any, i: int, token: int, output: Any) -> None:
    """As SGLang books the token that prefill puts out."""
    books.output_token_logprobs_val.append(output.next_token_logprobs[i])
    books.output_token_logprobs_idx.append(token)
    if books.top_logprobs_num:
        books.output_top_logprobs_val.append(output.next_token_top_logprobs_val[i])
        books.output_top_logprobs_idx.append(output.next_token_top_logprobs_idx[i])
    if books.token_ids_logprob is not None:
        books.output_token_ids_logprobs_val.append(output.next_token_token_ids_logprobs_val[i])
        books.output_token_ids_logprobs_idx.append(books.token_ids_logprob)
