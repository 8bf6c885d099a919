"""Count a request's thoughts anew, from its tokens up to its end."""

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req

from sglang_smc.upstream import IS_NEWEST

Count = Callable[[Req, list[int]], None]


def recount(req: Req, count: Count) -> None:
    """Set SGLang's `reasoning_tokens` of a request to those that its answer has.

    SGLang counts each step's tokens as they come: those behind the answer's end, too, and a first
    token that has changed since as it was.

    Args:
        count: SGLang's own, of more tokens.
    """
    req.reasoning_tokens = 0
    req._is_reasoning_over = False
    req._think_end_match_len = 0
    if IS_NEWEST:
        req._think_start_match_len = 0
    count(req, list(req.output_ids_through_stop))
