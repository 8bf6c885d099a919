"""End a particle's text where SGLang ends an answer's."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_batch import Req

from sglang_smc.rules.base import decoder_of
from sglang_smc.rules.stopping import StopTexts
from sglang_smc.state.texts import with_output


class Ended(NamedTuple):
    """The output of an answer, as SGLang reports it."""

    output_ids: list[int]
    finish_reason: dict[str, Any] | None  # None: nothing that SGLang looks for has ended it


class _Complete:
    """A grammar that has come to its end."""

    def is_terminated(self) -> bool:
        return True


def as_answer(req: Req, shared: Sequence[int], tail: Sequence[int]) -> Ended:
    """Return what SGLang would report of an answer with a particle's tokens.

    Args:
        req: the particle's request.
        shared: the output before this round.
        tail: the particle's tokens after it, which end its text.
    """
    ids = [*shared, *tail]
    own = with_output(req, ids)
    # A text that neither SGLang's stops nor its length end has been ended by its grammar.
    own.grammar = None if req.grammar is None else _Complete()
    own.update_finish_state(_num_checked(req, ids, len(tail)))
    StopTexts.end_at(own, StopTexts.match_after(req, shared, tail))
    reason = own.finished_reason
    return Ended(list(own.output_ids_through_stop), reason and reason.to_json())


def _num_checked(req: Req, ids: Sequence[int], num_new: int) -> int:
    """Return for how many of the last tokens SGLang is to look for an end.

    The last token ends a text, and nothing before, unless a stop string is spelled in more tokens
    than those in which SGLang looks for it. It sees these once they come all at once.
    """
    params = req.sampling_params
    if not (params.stop_strs and num_new):
        return 1
    before = decoder_of(req)(ids[-num_new - params.stop_str_max_len : -1])
    return num_new if any(stop in before for stop in params.stop_strs) else 1
