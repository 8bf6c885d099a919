"""Find stop strings and stop patterns in each particle before it is weighed.

Token ids do not show where a stop string ends, so this runs on the host, and only for requests that
have one.

SGLang would search the whole output for a pattern after each round, with `re`, and backtracking
can take exponential time. So patterns are removed from the request at prefill, and searched for
here alone: `end_at_match` ends a request at the match that SGLang would have found.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, FINISHED_MATCHED_REGEX, Req

from sglang_smc.guard.pattern import START, PatternState, pattern_of
from sglang_smc.rules.base import BatchTexts, LogitsRule, decoder_of
from sglang_smc.smc.population import Population
from sglang_smc.state.request import find_state, state_of
from sglang_smc.state.texts import shared_ids, tails_of

CONTEXT = 8
"""Tokens of context with which new ones are decoded: a token's text depends on the last few, and a
character may be split over four."""


class StopTexts(LogitsRule):
    """The stop strings and patterns of a batch."""

    def __init__(self, texts: BatchTexts) -> None:
        self._reqs = {group: req for group, req in enumerate(texts.reqs) if self.applies(req)}

    @classmethod
    def applies(cls, req: Req) -> bool:
        """Return whether a request has a stop string or a stop pattern."""
        params = req.sampling_params
        return bool(params.stop_strs or params.stop_regex_strs or _patterns(req))

    @classmethod
    def begin(cls, req: Req) -> None:
        """Take the patterns from the request; see `Rule.begin`."""
        if sources := req.sampling_params.stop_regex_strs:
            state_of(req).kept[cls] = StopPatterns(list(sources), decoder_of(req))
        cls.remove_patterns(req)

    @classmethod
    def remove_patterns(cls, req: Req) -> None:
        """Leave SGLang no pattern to search for."""
        if req.sampling_params.stop_regex_strs:
            req.sampling_params.stop_regex_strs = []
            req.sampling_params.stop_regex_max_len = 0

    @classmethod
    def end_at_match(cls, req: Req) -> None:
        """End a request at a pattern's match in its output; SGLang has checked the rest before."""
        if patterns := _patterns(req):
            cls.end_at(req, patterns.match_in(shared_ids(req)))

    @classmethod
    def end_at(cls, req: Req, match: "PatternMatch | None") -> None:
        """End a request at a pattern's match, unless its output ends before."""
        if match is not None and _is_first(req, match.length):
            req.finished_reason = FINISHED_MATCHED_REGEX(matched=match.source)
            req.finished_len = match.length

    @classmethod
    def match_after(
        cls, req: Req, shared: Sequence[int], tail: Sequence[int]
    ) -> "PatternMatch | None":
        """Return a pattern's first match in the output that particles share and a tail."""
        patterns = _patterns(req)
        return patterns.match_after(shared, tail) if patterns else None

    @classmethod
    def holds_back(cls, req: Req) -> bool:
        """Return whether what a request has put out is not to be sent, since its end may cut it.

        A stream waits while a stop may have begun, a whole answer for its end.
        """
        return cls.applies(req) and (not req.stream or _may_have_begun(req))

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Mark candidates that complete a stop text; see `LogitsRule.ends`."""
        ends = ends.clone()
        for group, req in self._reqs.items():
            candidates = tokens[group].tolist()
            tails = tails_of(req, population, group) if population else [[]] * len(candidates)
            for particle, tail in enumerate(tails):
                match = first_match(req, tail, candidates[particle])
                if match is not None:
                    ends[group, particle, match] = True
        return ends


class _Reading(NamedTuple):
    """The state of the patterns after a sequence."""

    tokens: list[int]  # the last ones, with which new ones are decoded
    num_known: int  # characters of their text that the patterns have consumed
    states: tuple[PatternState, ...]  # by pattern


class PatternMatch(NamedTuple):
    """Where a pattern first matches."""

    source: str  # the pattern
    length: int  # tokens of the output, up to where it first does


class StopPatterns:
    """The stop patterns of one request, and their state after the output that particles share."""

    def __init__(self, sources: list[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.sources = sources
        self._patterns = [pattern_of(source) for source in sources]
        self._decode = decode
        self._shared = _Reading([], 0, (START,) * len(sources))
        self._num_read = 0
        self._match: PatternMatch | None = None

    def match_in(self, shared: Sequence[int]) -> PatternMatch | None:
        """Return the first match in output tokens, which only grow from call to call."""
        for token in shared[self._num_read :]:
            if self._match is not None:
                break
            self._num_read += 1
            following = self._read(self._shared, [token])
            if isinstance(following, str):
                self._match = PatternMatch(following, self._num_read)
            else:
                self._shared = following
        return self._match

    def match_after(self, shared: Sequence[int], tail: Sequence[int]) -> PatternMatch | None:
        """Return the first match in the output that particles share and one of their tails."""
        if (found := self.match_in(shared)) is not None:
            return found
        reading: _Reading | str = self._shared
        for length, token in enumerate(tail, len(shared) + 1):
            reading = self._read(reading, [token])
            if isinstance(reading, str):
                return PatternMatch(reading, length)
        return None

    def first_match(self, shared: list[int], tail: list[int], new_tokens: list[int]) -> int | None:
        """Return the first match; see the function `first_match`."""
        self.match_in(shared)
        reading = self._read(self._shared, tail)
        for index, token in enumerate(new_tokens):
            if isinstance(reading, str):
                return index  # the tail has ended before
            reading = self._read(reading, [token])
            if isinstance(reading, str):
                return index
        return None

    def _read(self, reading: _Reading, tokens: list[int]) -> _Reading | str:
        """Advance over tokens; return the new state, or the pattern that matches."""
        tokens = [*reading.tokens, *tokens]
        text = self._decode(tokens)
        num_known = len(text.rstrip("\ufffd"))  # an incomplete character changes with more tokens
        states = []
        each = zip(self.sources, self._patterns, reading.states, strict=True)
        for source, pattern, state in each:
            following = pattern.read(state, text[reading.num_known : num_known])
            if following is None or pattern.ends(following):
                return source
            states.append(following)
        if num_known == len(text) and len(tokens) > 2 * CONTEXT:
            tokens = tokens[-CONTEXT:]
            num_known = len(self._decode(tokens))
        return _Reading(tokens, num_known, tuple(states))


def first_match(req: Req, tail: list[int], new_tokens: list[int]) -> int | None:
    """Return the index of the new token that completes a stop string or pattern, or None.

    Args:
        req: the request; its `shared_ids` are the output that all particles share.
        tail: the particle's tokens beyond it.
        new_tokens: candidates to append.
    """
    shared = shared_ids(req)
    patterns = _patterns(req)
    decode = decoder_of(req)
    window = req.sampling_params.stop_str_max_len + 1  # tokens that a stop string spans, by SGLang
    lineage = [*shared[-window:], *tail]
    found = patterns.first_match(shared, tail, new_tokens) if patterns else None
    stops = req.sampling_params.stop_strs or ()
    for index, token in enumerate(new_tokens[:found] if stops else ()):
        lineage.append(token)
        text = decode(lineage[-window:])
        if any(stop in text for stop in stops):
            return index
    return found


def _may_have_begun(req: Req) -> bool:
    """Return whether a request's output ends with the beginning of a text that its end would cut.

    SGLang cuts a stop string, and what is spelled as the pattern that has matched. It may send the
    characters before one that is not complete.
    """
    patterns = _patterns(req)
    stops = [*(req.sampling_params.stop_strs or ()), *(patterns.sources if patterns else ())]
    longest = max(len(stop.encode()) for stop in stops)  # tokens, of a byte each at least
    text = decoder_of(req)(shared_ids(req)[-longest - CONTEXT :]).rstrip("\ufffd")
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop) + 1))


def _patterns(req: Req) -> StopPatterns | None:
    state = find_state(req)
    return state and state.kept.get(StopTexts)


def _is_first(req: Req, length: int) -> bool:
    """Return whether a pattern's match ends a request before SGLang's own match does."""
    if not req.finished():
        return True
    if req.finished_len is None:
        return False  # aborted, or ended by another rule
    is_string = isinstance(req.finished_reason, FINISH_MATCHED_STR)
    return length < req.finished_len + (not is_string)
