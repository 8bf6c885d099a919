"""Tell which tokens of a request all particles share, and which of them the draft has read."""

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from sglang_smc.smc.population import Population
from sglang_smc.state.request import find_state, state_of


def has_open_token(req: Req) -> bool:
    """Return whether the newest output token is a placeholder for one that particles differ in."""
    state = find_state(req)
    return state is not None and state.open_token.is_open


def shared_ids(req: Req) -> list[int]:
    """Return the output tokens that all particles share."""
    state = find_state(req)
    return list(req.output_ids[: state.open_token.place if state is not None else None])


def with_output(req: Req, output_ids: Sequence[int]) -> Any:
    """Return a copy of a request with another output, in which SGLang has not looked for an end.

    It has no state of this package, so that hooks leave it to SGLang.
    """
    own: Any = Req.__new__(Req)
    vars(own).update(vars(req))
    own.smc_state = None
    own.output_ids = req.output_ids[:0]
    own.output_ids.extend(output_ids)
    own.finished_reason = own.finished_len = own.to_finish = None
    own.surr_offset = own.read_offset = None
    return own


def skip_draft(req: Req) -> int:
    """Note that the draft does not read the token of a round; return how many it has skipped.

    More than these where it has not read all of the prompt, which `skip_prompt` notes.

    A round before may have left the last two tokens unread. Those before them are on the host when
    drafting resumes, possibly one round late.
    """
    state = state_of(req)
    prompt = len(req.origin_input_ids)
    place = state.open_token.place
    num_tokens = prompt + (len(req.output_ids) if place is None else place)
    if state.num_read is None:
        state.num_read = max(num_tokens - 2, prompt)
    return num_tokens - 1 - state.num_read


def skip_prompt(req: Req) -> None:
    """Note that the draft has yet to read some of a prompt, which `kv.unread` has marked."""
    state_of(req).num_read = 0


def num_unread(req: Req) -> int:
    """Return how many tokens the draft has yet to read, at most."""
    num_read = state_of(req).num_read
    return 0 if num_read is None else len(req.origin_input_ids) + len(req.output_ids) - num_read


def take_unread(req: Req) -> tuple[int, int]:
    """Return the span of a text that the draft has yet to read, as its start and its end.

    It ends with the last token but one that is known, or with what prefill has read. The host may
    be a round behind; the next round's first pass reads its last two tokens anyway.
    """
    state = state_of(req)
    start = state.num_read or 0
    state.num_read = None
    num_known = max(len(shared_ids(req)) - 1, state.num_prefilled)
    return start, len(req.origin_input_ids) + num_known


def tails_of(req: Req, population: Population, group: int) -> list[list[int]]:
    """Return each particle's tokens after the output that all particles share."""
    is_open = has_open_token(req)
    columns = population.last_emitted, population.tokens, population.lengths
    each = zip(*(column[group].tolist() for column in columns), strict=True)
    return [[*([first] if is_open else []), *tail[:length]] for first, tail, length in each]
