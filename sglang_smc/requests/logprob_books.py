"""A request's log-probabilities in SGLang's books, on the host."""

from typing import TYPE_CHECKING

import torch

from sglang_smc.state.tail_logprobs import TailLogprobs

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req


def deliver(
    output: "LogitsProcessorOutput", logprobs: TailLogprobs, counts: list[int], reqs: "list[Req]"
) -> None:
    """Hand a round's emitted tokens' log-probabilities to SGLang's books, on the host.

    Args:
        output: of the round; SGLang reads a rectangle of as many tokens for each request.
        logprobs: ``[G, T, ...]``.
        counts: ``[G]`` tokens emitted.
        reqs: the batch.
    """
    emitted = TailLogprobs(*(column[:, : max(counts)] for column in logprobs))
    tops = [req.logprob.top_logprobs_num if req.return_logprob else 0 for req in reqs]
    ids = [(req.return_logprob and req.logprob.token_ids_logprob) or [] for req in reqs]
    output.next_token_logprobs = emitted.own
    output.next_token_top_logprobs_val = _rows(emitted.top, tops)
    output.next_token_top_logprobs_idx = _rows(emitted.top_ids, tops)
    output.next_token_token_ids_logprobs_val = _rows(emitted.listed, [len(few) for few in ids])
    output.next_token_token_ids_logprobs_idx = [few for few in ids for _ in range(max(counts))]


def settle(req: "Req", place: int, token: int, logprob: float) -> None:
    """Put the token that all particles agree on in place of one that stood in for it.

    What is likely in that place does not depend on it.
    """
    tokens, values = req.logprob.output_token_logprobs_idx, req.logprob.output_token_logprobs_val
    assert tokens is not None and values is not None, "there where a request asks for any"
    tokens[place], values[place] = token, logprob


def rewind_stream(req: "Req") -> None:
    """Have the stream begin with the first token's log-probability, whatever SGLang counts.

    Under the overlap schedule a request may be retracted before the token of its prefill is taken.
    SGLang streams it all the same, without a token, and as if one log-probability had gone with it.
    """
    if req.return_logprob:
        sent = req.send_output_token_logprobs_offset
        req.send_output_token_logprobs_offset = min(sent, req.send_token_offset)


def take_back(req: "Req", start: int) -> None:
    """Forget the output tokens from ``start`` on."""
    if req.return_logprob:
        for name in _BOOKS:
            del getattr(req.logprob, name)[start:]


# Lists of SGLang's ReqLogprob with one entry for each output token, or none where not asked for.
_BOOKS = tuple(
    f"output_{kind}logprobs_{part}"
    for kind in ("token_", "top_", "token_ids_")
    for part in ("val", "idx")
)


def _rows(values: torch.Tensor, widths: list[int]) -> list[list[float] | torch.Tensor]:
    """One tensor for each request and token, ``[G, C, W]`` to ``[widths[g]]``."""
    return [
        row[:width] for of_req, width in zip(values, widths, strict=True) for row in of_req.unbind()
    ]
