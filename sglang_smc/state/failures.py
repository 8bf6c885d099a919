"""End a single request with an error.

A round on the device reports a request that cannot continue by a `Failure` code, and leaves it
unchanged until the host reads the code: after a round in the round's result, after prefill as an
id outside the vocabulary in place of the first token. The host then ends the request as SGLang
ends an aborted one. HTTP clients receive the status and the message; a stream ends with them.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from sglang_smc.printable import MOST_TOLD, brief, printable
from sglang_smc.smc.steps import Failure, failure_codes
from sglang_smc.state.settings import stop_tokens

logger = logging.getLogger(__name__)

#: The `err_type` of requests that SMC ends; SGLang's own are others.
ERROR_TYPE = "SMCError"


def is_own(finish_reason: Mapping[str, Any]) -> bool:
    """Return whether `end_request` has made a finish reason, as `meta_info` has it.

    SGLang makes such records in many places. All have a `type`; an abort has a `message`, has a
    `status_code` where it is an error, and an `err_type` only from `FINISH_ABORT.to_json`.
    """
    return finish_reason.get("err_type") == ERROR_TYPE


_NO_TOKEN = (
    "The {} model's logits for this text leave no token to draw: they are NaN or infinite. Others "
    "are not affected. Check the weights of {} and the server's --dtype: float16 overflows where "
    "bfloat16 does not."
)
_MODELS = {
    Failure.TARGET_LOGITS: ("target", "--model-path"),
    Failure.DRAFT_LOGITS: ("draft", "--speculative-draft-model-path"),
}
_FORBIDS_ALL = (
    "The request forbids all tokens: each would end its text (by stop_token_ids or the model), and "
    "min_new_tokens forbids an end. Leave min_new_tokens out, or some stop tokens."
)


def end_request(req: Req, message: str, status: HTTPStatus) -> None:
    """End a request with an error at SGLang's next check for its end.

    Args:
        req: in the scheduler; a request that is about to end anyway is left as it is.
        message: the cause and its remedy; control characters in it are escaped, and the
            middle of a long one is left out.
        status: 400, 500 or 503; SGLang turns no other status of an abort into an error.
    """
    if req.finished() or req.to_finish:
        return
    # The message may quote a client, a potential or a remote service; SGLang logs it, too.
    told = brief(printable(message), MOST_TOLD)
    logger.error("SMC ends request %s: %s", printable(req.rid), printable(told))
    req.to_finish = FINISH_ABORT(told, status, ERROR_TYPE)
    # The KV in its slots may be the cause, and must not be reused as a prefix.
    req.skip_radix_cache_insert = True


def end_failed(req: Req, code: int) -> bool:
    """End a request as `rules.registry.end_failed`, where no rule is the cause."""
    if code and _forbids_all(req):
        end_request(req, _FORBIDS_ALL, HTTPStatus.BAD_REQUEST)
        return False
    if code:
        message = _NO_TOKEN.format(*_MODELS[Failure(code)])
        end_request(req, message, HTTPStatus.INTERNAL_SERVER_ERROR)
    return bool(code)


def _forbids_all(req: Req) -> bool:
    """Return whether all tokens are stop tokens while `min_new_tokens` forbids these."""
    params = req.sampling_params
    if not params.min_new_tokens:
        return False
    assert req.vocab_size is not None, "SGLang's scheduler sets it on each request"
    stops = stop_tokens(params.stop_token_ids, req.eos_token_ids, req.tokenizer, req.vocab_size)
    return len(stops) >= req.vocab_size


def mark_first(tokens: torch.Tensor, failure: torch.Tensor) -> torch.Tensor:
    """Return first tokens ``[G]``, with negated failure codes ``[G]`` in place of invalid ones."""
    return torch.where(failure > 0, -failure, tokens)


def take_mark(req: Req) -> int:
    """Remove and return the failure code in place of a request's first token; 0 for a token."""
    if not req.output_ids or req.output_ids[-1] >= 0:
        return 0
    req.return_logprob = False  # there is no token to report one for
    return -req.output_ids.pop()


def failure_of_first(target: torch.Tensor, draft: torch.Tensor | None) -> torch.Tensor:
    """Return the failure codes ``[G]`` after prefill.

    Args:
        target: ``[G, V]`` log-probabilities of the first token, NaN where logits give none.
        draft: ``[G, V]`` logits, not sampled from yet; None where the proposer has none.
    """
    is_broken = target[:, 0].isnan()
    if draft is None:
        return failure_codes(is_broken, torch.zeros_like(is_broken))
    return failure_codes(is_broken, ~draft.float().logsumexp(1).isfinite())
