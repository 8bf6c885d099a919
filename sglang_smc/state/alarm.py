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


class UselessDrafts:
    """State of the alarm.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rounds = 0
        self._kept = 0
        self._warned = -math.inf
        self.is_on: bool | None = None  # None before the first `ROUNDS`

    def add(self, num_kept: int) -> None:
        """Count one request's round for which a model has drafted."""
        self._rounds += 1
        self._kept += num_kept

    def check(self) -> str | None:
        """Set `is_on` once `ROUNDS` are counted, and return the warning as it begins, or None."""
        if self._rounds < ROUNDS:
            return None
        mean = self._kept / self._rounds
        rounds = self._rounds
        was_on = self.is_on
        self._rounds = 0
        self._kept = 0
        self.is_on = mean < FEW_KEPT
        if was_on or not self.is_on or self._now() < self._warned + SECONDS:
            return None
        self._warned = self._now()
        return (
            f"Drafts are of no use: the target accepted {mean:.3f} draft tokens a round, over the "
            f"last {rounds} rounds that drafted. Answers are right, and slower than without. "
            "Likely causes: a head that was trained for another model, or for the 16-bit weights "
            "of a target that is quantised; a draft of another vocabulary or chat template; target "
            "weights that were updated without the draft's; a token map that leaves out the text's "
            f"tokens. Compare the draft's model card with --model-path, update both, or pass "
            f"another --speculative-draft-model-path or {flag_of('adaptive')}, which then decodes "
            "plainly. /server_info and the metric useless_drafts say whether it goes on."
        )
