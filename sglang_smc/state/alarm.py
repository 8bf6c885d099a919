"""Find that a draft is of no use: nearly all its tokens are rejected, while answers stay right.

It costs speed alone, so nothing else tells.
"""

import math
from collections.abc import Callable

from sglang_smc.options.server import flag_of

FEW_KEPT = 0.1
"""Accepted draft tokens a round, below which drafts are of no use.

A poor draft of random text keeps a third of its tokens; a wrong one keeps what is right by chance.
"""

ROUNDS = 400
"""Rounds of requests over which the mean is taken: beside 0.2, the standard error is 0.03."""

SECONDS = 600.0
"""Seconds between two warnings of a server whose drafts are of use in between."""


SPANS = {"0_2k": 0, "2k_8k": 2048, "8k_32k": 8192, "32k": 32768}
"""Lengths of texts that are told apart, in tokens: their names, and where each begins."""


def span_of(length: int) -> str:
    """Return the name of the span that a text of ``length`` tokens is in."""
    return next(name for name, begin in reversed(SPANS.items()) if length >= begin)


class _Mean:
    """Mean of accepted draft tokens a round, over `ROUNDS` rounds at a time."""

    def __init__(self) -> None:
        self._rounds = 0
        self._kept = 0
        self.is_low: bool | None = None  # None before the first `ROUNDS`

    def add(self, num_kept: int) -> None:
        self._rounds += 1
        self._kept += num_kept

    def falls(self) -> str | None:
        """Set `is_low` once `ROUNDS` are counted; return the mean, in words, as it becomes so."""
        if self._rounds < ROUNDS:
            return None
        mean = self._kept / self._rounds
        told = f"{mean:.3f} draft tokens a round, over the last {self._rounds} rounds that drafted"
        was_low = self.is_low
        self._rounds = 0
        self._kept = 0
        self.is_low = mean < FEW_KEPT
        return told if self.is_low and not was_low else None


class UselessDrafts:
    """State of the alarm.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._all = _Mean()
        self._spans = {name: _Mean() for name in SPANS}
        self._warned = -math.inf

    @property
    def is_on(self) -> bool | None:
        """Return whether drafts are of no use; None before the first `ROUNDS`."""
        return self._all.is_low

    @property
    def begins_at(self) -> int | None:
        """Return the least length of texts in which drafts are of no use; None where there is none.

        That of a span behind which they are of use again does not count.
        """
        first = None
        for name, begin in SPANS.items():
            is_low = self._spans[name].is_low
            if is_low is False:
                first = None
            elif is_low and first is None:
                first = begin
        return first

    def add(self, num_kept: int, span: str) -> None:
        """Count one request's round for which a model has drafted, in a text of this span."""
        self._all.add(num_kept)
        self._spans[span].add(num_kept)

    def check(self) -> str | None:
        """Return the warning as drafts become of no use, in all texts or in long ones, or None."""
        in_long = [one.falls() for one in self._spans.values()]
        in_all = self._all.falls()
        told = in_all or next(filter(None, in_long), None)
        begin = self.begins_at
        if told is None or self._now() < self._warned + SECONDS:
            return None
        is_long = any(one.is_low is False for one in self._spans.values())
        if is_long and begin:
            self._warned = self._now()
            return _in_long_texts(begin, told)
        if in_all is None:
            return None
        self._warned = self._now()
        return (
            f"Drafts are of no use: the target accepted {told}. Answers are right, and slower than "
            "without. Likely causes: a head that was trained for another model, or for the 16-bit "
            "weights of a target that is quantised; a draft of another vocabulary or chat "
            "template; target weights that were updated without the draft's; a token map that "
            "leaves out the text's tokens. Compare the draft's model card with --model-path, "
            "update both, or pass another --speculative-draft-model-path or "
            f"{flag_of('adaptive')}, which then decodes plainly. /server_info and the metric "
            "useless_drafts say whether it goes on."
        )


def _in_long_texts(begin: int, told: str) -> str:
    return (
        f"Drafts are of no use in texts of {begin:,} tokens and more: there the target accepted "
        f"{told}, while in shorter ones drafts are of use. Answers are right. Likely the draft was "
        "trained on shorter texts than these: pass --speculative-draft-window-size with as many "
        "tokens as those had, or fewer (docs/drafts.md, Long texts). /server_info says under "
        "useless_drafts_from whether it goes on."
    )
