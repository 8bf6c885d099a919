"""Ends one request with an error, and no other with it.

A device that finds that a request cannot go on says so by a code of `Failure`, and lets the request
stand still, since the host hears of it later: after a round in the round's result, after prefill by
an id outside the vocabulary in place of the first token. The host then ends the request as SGLang
ends one that is aborted. HTTP clients get the status and the sentence; a stream ends with them.
"""

import logging
from enum import IntEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_smc.printable import printable
from sglang_smc.state.settings import stop_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


class Failure(IntEnum):
    """Why a request cannot go on, as a device says it; 0 is none."""

    TARGET_LOGITS = 1
    DRAFT_LOGITS = 2


class _Answer(NamedTuple):
    message: str
    status: HTTPStatus


def _broken(model: str, flag: str) -> _Answer:
    return _Answer(
        f"The {model} model's logits for this text leave no token to draw: they are NaN or "
        "infinite, unless its custom_logit_processor forbids all tokens. Others are not affected. "
        f"Check the weights of {flag} and the server's --dtype: float16 overflows where bfloat16 "
        "does not.",
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )


_ANSWERS = {
    Failure.TARGET_LOGITS: _broken("target", "--model-path"),
    Failure.DRAFT_LOGITS: _broken("draft", "--speculative-draft-model-path"),
}


_FORBIDS_ALL = (
    "The request forbids all tokens: each would end its text (by stop_token_ids or the model), and "
    "min_new_tokens forbids an end. Leave min_new_tokens out, or some stop tokens."
)


def end_request(req: "Req", message: str, status: HTTPStatus) -> None:
    """Let a request end at its next look for an end, with an error.

    Args:
        req: in the scheduler; where it is about to end anyway, it ends as it would.
        message: what happened, and what to do; control characters in it are escaped.
        status: 400, 500 or 503; for others SGLang makes no error of an abort.
    """
    if req.finished() or req.to_finish:
        return
    # It may quote a client, a potential or a remote service; SGLang logs what it ends with, too.
    logger.error("SMC ends request %s: %s", printable(req.rid), printable(message))
    req.to_finish = FINISH_ABORT(printable(message), status, status.name)
    # What stands in its KV slots may be the cause, and must not be found again.
    req.skip_radix_cache_insert = True


def end_failed(req: "Req", code: int) -> bool:
    """End a request by what the device says of it; 0 is nothing. Says whether a model is broken."""
    if code and _forbids_all(req):
        end_request(req, _FORBIDS_ALL, HTTPStatus.BAD_REQUEST)
        return False
    if code:
        end_request(req, *_ANSWERS[Failure(code)])
    return bool(code)


def _forbids_all(req: "Req") -> bool:
    """Whether a request leaves no token to begin with: all would end it, and none may yet."""
    params = req.sampling_params
    if not params.min_new_tokens:
        return False
    assert req.vocab_size is not None, "SGLang's scheduler sets it on each request"
    given = params.stop_token_ids, req.eos_token_ids, req.tokenizer, req.vocab_size
    return len(stop_tokens(*given)) >= req.vocab_size


def mark_first(tokens: torch.Tensor, failure: torch.Tensor) -> torch.Tensor:
    """First tokens ``[G]``, with codes ``[G]`` in place of those that mean nothing."""
    return torch.where(failure > 0, -failure, tokens)


def take_mark(req: "Req") -> int:
    """The code in place of a request's first token, which goes with it; 0 where it is a token."""
    if not req.output_ids or req.output_ids[-1] >= 0:
        return 0
    req.return_logprob = False  # there is no token for one
    return -req.output_ids.pop()


def failure_of_first(target: torch.Tensor, draft: torch.Tensor | None) -> torch.Tensor:
    """Codes ``[G]`` after prefill.

    Args:
        target: ``[G, V]`` log-probabilities of the first token, all NaN where logits give none.
        draft: ``[G, V]`` logits, which nothing is drawn from yet; None where there are none.
    """
    is_broken = target[:, 0].isnan()
    if draft is None:
        return _codes(is_broken, torch.zeros_like(is_broken))
    return _codes(is_broken, ~draft.float().logsumexp(1).isfinite())


def failure_of_round(
    target: torch.Tensor,
    draft: torch.Tensor,
    before_end: torch.Tensor,
    ends: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """Codes ``[G]``: whether a particle came to where logits give no law.

    Args:
        target: ``[G, N, K + 1]`` log-probabilities of any token in each column; NaN where there is
            no law, since a law's normaliser is NaN then.
        draft: ``[G, N, K]`` log-probabilities of the drafted tokens, the same.
        before_end: ``[G, N, K]`` bool: up to each particle's end, and within its request's K.
        ends: ``[G, N, K]`` bool: the text ends with this token.
        live: ``[G, N]`` bool: present, and not ended.
    """
    # The target is asked for what follows each open column, unless the text ends there.
    asked = torch.cat([live.unsqueeze(2), before_end & ~ends], dim=2)  # [G, N, K + 1]
    return _codes(_any(target.isnan() & asked), _any(draft.isnan() & before_end))


def _any(flags: torch.Tensor) -> torch.Tensor:
    return flags.flatten(1).any(1)


def _codes(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """The codes of flags ``[G]``; a broken target says it all."""
    code = torch.where(draft, int(Failure.DRAFT_LOGITS), 0)
    return torch.where(target, int(Failure.TARGET_LOGITS), code)
