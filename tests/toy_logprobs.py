"""A toy worker whose requests ask for log-probabilities, and SGLang's books of them."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor as Books,
)
from toy_worker import ToyRequest, ToyWorker

from sglang_smc.requests.logprob_books import deliver, settle
from sglang_smc.requests.state import has_open_token
from sglang_smc.state.transfer import each_tensor

Shown = tuple[int, list[int] | None] | None
"""How many of the likeliest tokens, and which tokens of its own; None asks for nothing."""


class AskingWorker(ToyWorker):
    """Row r is shown ``shown[(r - 1) % len(shown)]``."""

    def __init__(self, *args: Any, shown: tuple[Shown, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown = shown
        self.begun: list[Any] = []

    def begin(self, rows: list[int], noise: torch.Tensor) -> list[ToyRequest]:
        """Prefill, with the first tokens' log-probabilities."""
        reqs = super().begin(rows, noise)
        for req in reqs:
            self._ask(req, self.shown[(req.row - 1) % len(self.shown)])
        batch: Any = self.batch(reqs)
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
        tables, width = self.worker._tables, self.config.num_particles
        log_p = torch.log_softmax(self.target.language.after(()), -1).expand(len(rows), -1).clone()
        last_emitted = tables.particles.gather(batch.req_pool_indices, width, 1).last_emitted
        output = LogitsProcessorOutput(next_token_logits=None)
        tables.logprobs.begin(batch, log_p, last_emitted, output)
        Books.move_logprobs_to_cpu(None, batch=_returning(batch), logits_output=output)  # type: ignore[arg-type]
        for i, req in enumerate(reqs):
            if req.return_logprob:
                _first(req.logprob, i, req.output_ids[0], output)
        self.begun += reqs
        return reqs

    def play_round(self, reqs: list[ToyRequest]) -> Any:
        """A round, and what it says of its tokens into the books, as SGLang itself reads it."""
        result = super().play_round(reqs)
        if result.logprobs is None:
            assert not any(req.return_logprob for req in reqs)
            return result
        tokens = result.next_token_ids.view(len(reqs), -1)
        counts = result.accept_lens.tolist()
        output = result.logits_output
        tails = each_tensor(torch.Tensor.cpu, result.logprobs.tails)
        deliver(output, tails, counts, reqs)  # type: ignore[arg-type]
        batch: Any = _returning(SimpleNamespace(reqs=reqs))
        emitted = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
        books: Any = SimpleNamespace(_resolve_spec_v2_tokens=lambda *_: emitted)
        found = Books._normalize_decode_outputs(
            books, batch=batch, result=result, logits_output=output, next_token_ids=tokens
        )
        for i, req in enumerate(reqs):
            if req.return_logprob:
                self._book(i, req, batch, found, result)
        return result

    def _book(self, i: int, req: Any, batch: Any, found: Any, result: Any) -> None:
        tokens, logprobs = found
        if has_open_token(req) and result.first_tokens[i] >= 0:
            settle(req, 0, int(result.first_tokens[i]), float(result.logprobs.first[i]))
        Books._apply_decode_logprobs(
            None,  # type: ignore[arg-type]
            req=req,
            i=i,
            batch=batch,
            next_token_id=tokens[i],
            next_token_logprobs=logprobs,
            logits_output=result.logits_output,
        )

    def _ask(self, req: ToyRequest, shown: Shown) -> None:
        num_top, ids = shown or (0, None)
        req.return_logprob = shown is not None
        lists = {
            f"output_{kind}_logprobs_{part}": []
            for kind in ("token", "top", "token_ids")
            for part in ("val", "idx")
        }
        req.logprob = ReqLogprob(top_logprobs_num=num_top, token_ids_logprob=ids, **lists)


def _returning(batch: Any) -> Any:
    batch.return_logprob = True
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    return batch


def _first(books: ReqLogprob, i: int, token: int, output: LogitsProcessorOutput) -> None:
    """As SGLang books the token that prefill puts out."""
    books.output_token_logprobs_val.append(output.next_token_logprobs[i])
    books.output_token_logprobs_idx.append(token)
    if books.top_logprobs_num:
        books.output_top_logprobs_val.append(output.next_token_top_logprobs_val[i])
        books.output_top_logprobs_idx.append(output.next_token_top_logprobs_idx[i])
    if books.token_ids_logprob is not None:
        books.output_token_ids_logprobs_val.append(output.next_token_token_ids_logprobs_val[i])
        books.output_token_ids_logprobs_idx.append(books.token_ids_logprob)
