"""The first token of a request whose particles may differ in it.

Prefill must put out one token. For p itself all particles share it. A power of p, or p under a
mask, knows the law of its next token only given all that may follow, so that a shared token could
not be corrected: each particle draws its own, and the token in SGLang's books stands in for them.

    SHARED  --begin-->  OPEN  --settle-->  SETTLED  --take-->  SHARED
                        OPEN  --withdraw-->  SHARED

    transition   who calls it                                  when
    begin        RequestStates.begin                           at each prefill
    hold         patches/request_state, update_finish_state    SGLang has taken the stand-in
    settle       rules.settle, from SMCBatchResult.resolve     particles have come to agree
    take         patches/request_state, update_finish_state    SGLang looks for an end
    withdraw     rules.withdraw, from patches/request_state    the request is retracted
"""

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from sglang_smc.requests.logprob_books import settle, take_back

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Phase(Enum):
    """Where a first token stands."""

    SHARED = "one token, for good"
    OPEN = "particles may differ in it"
    SETTLED = "they have just come to agree on it"


class OpenToken(msgspec.Struct):
    """The state of one request's first token."""

    phase: Phase = Phase.SHARED
    place: int | None = None  # in output_ids, while it is open
    holds_stream: bool = False  # until it is settled
    settled: int = -1  # what they came to agree on last

    @property
    def is_open(self) -> bool:
        """Whether the newest output token is a stand-in."""
        return self.phase is Phase.OPEN

    def begin(self, place: int | None) -> None:
        """A prefill draws the output token at ``place`` for each particle; None: for all."""
        self.phase = Phase.SHARED if place is None else Phase.OPEN
        self.place = place

    def hold(self, req: "Req") -> None:
        """Stream nothing of a request whose newest token may still change."""
        assert self.phase is Phase.OPEN
        self.holds_stream, req.stream = self.holds_stream or req.stream, False

    def settle(self, req: "Req", token: int, logprob: float | None) -> None:
        """Put the token that all particles agree on in the place of the stand-in."""
        assert self.phase is Phase.OPEN and self.place is not None
        req.output_ids[self.place] = token
        if logprob is not None:
            settle(req, self.place, token, logprob)
        self.phase, self.place, self.settled = Phase.SETTLED, None, token
        self._release(req)

    def take(self) -> int:
        """How many tokens that SGLang has not looked at yet this adds: 1 right after `settle`."""
        was_settled = self.phase is Phase.SETTLED
        if was_settled:
            self.phase = Phase.SHARED
        return int(was_settled)

    def withdraw(self, req: "Req") -> int:
        """Drop the stand-in from SGLang's books; returns how many tokens that took."""
        if self.phase is not Phase.OPEN:
            return 0
        assert self.place is not None
        num_dropped = len(req.output_ids) - self.place
        del req.output_ids[self.place :]
        take_back(req, self.place)
        self.phase, self.place = Phase.SHARED, None
        self._release(req)
        return num_dropped

    def _release(self, req: "Req") -> None:
        req.stream, self.holds_stream = req.stream or self.holds_stream, False
