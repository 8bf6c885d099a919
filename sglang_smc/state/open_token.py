"""Keep a request's first token open while its particles may differ in it.

Prefill must return one token. If the target is p, all particles share it. For a power of p, or p
under a mask, the marginal of the first token depends on all continuations, so a shared token could
not be corrected by weights: each particle draws its own, and the token in SGLang's lists is a
placeholder.

    SHARED  --begin-->  OPEN  --close-->  CLOSED  --take-->  SHARED
                        OPEN  --withdraw-->  SHARED

    transition   called by                                         when
    begin        RequestStates.begin                               at each prefill
    close        registry.close_token, by SMCBatchResult.resolve   all particles share the token
    take         patches/request_state, update_finish_state        SGLang checks for an end
    withdraw     registry.withdraw_token, patches/request_state    the request is retracted
"""

import msgspec
from sglang.srt.managers.schedule_batch import Req

# Lists of SGLang's ReqLogprob with one entry per output token, or empty where not requested.
LOGPROB_FIELDS = tuple(
    f"output_{kind}logprobs_{part}"
    for kind in ("token_", "top_", "token_ids_")
    for part in ("val", "idx")
)


class OpenToken(msgspec.Struct):
    """First token of one request, with its transitions."""

    place: int | None = None  # OPEN: in output_ids
    shared: int | None = None  # CLOSED: the token that particles have come to share

    @property
    def is_open(self) -> bool:
        """Return whether the newest output token is a placeholder."""
        return self.place is not None

    def begin(self, place: int | None) -> None:
        """Start with a prefill: each particle draws a token at ``place``; None if they share it."""
        self.place = place
        self.shared = None

    def close(self, req: Req, token: int) -> None:
        """Replace the placeholder by the token that all particles share."""
        assert self.place is not None
        req.output_ids[self.place] = token
        self.place = None
        self.shared = token

    def take(self) -> int:
        """Return the number of tokens that SGLang has not checked yet: 1 right after `close`."""
        was_closed = self.shared is not None
        self.shared = None
        return int(was_closed)

    def withdraw(self, req: Req) -> int:
        """Drop the placeholder from SGLang's lists, and return the number of tokens removed."""
        if self.place is None:
            return 0
        num_dropped = len(req.output_ids) - self.place
        del req.output_ids[self.place :]
        for name in LOGPROB_FIELDS if req.return_logprob else ():
            del getattr(req.logprob, name)[self.place :]
        self.place = None
        return num_dropped
