"""Define the trace of an answer, round by round, which ``"trace": true`` requests.

Lists are by particle, in the order of their places, unless stated otherwise. Minus infinity, the
log-weight of a dead particle, is null.
"""

import msgspec

VERSION = 1


class TracedRound(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One round of one request.

    A round drafts, scores and decides; each particle then becomes a copy of its entry in
    `ancestors`; each that has not ended takes a bonus token; `narrowed_to` is the resampling that
    bounds the lag, or draws the answer.
    """

    emitted_before: list[int] = []
    """Tokens of the answer before `begins`: of prefills after which the request was retracted
    before it had a round."""

    begins: list[int] | None = None
    """In the first round after a prefill, the first token of each particle. Earlier particles are
    gone: a retraction drops all tokens that were not emitted."""

    resized_from: list[int] | None = None
    """If N has changed since the round before, the particle of that round that each one copies."""

    log_weights_before: list[float | None]  # not normalised, at the start of the round
    drafted: list[list[int]]  # draft tokens; none for a particle that had ended
    kept: list[int]  # how many of these; in rounds that verify, how many of its ancestor's
    log_weights: list[float | None]  # after the kept columns, before resampling
    log_potentials: list[float | None] | None = None  # the potentials' part of these, in this round

    ess: float
    """Effective sample size of `log_weights`, from 1 to N; in rounds that verify, of the weights
    after the kept columns. 0 where logits are invalid."""

    log_block_evidence: float | None
    """Log of the factor by which the kept columns multiply the mean weight."""

    cut: str
    """Why the round kept no more: "none", it kept all draft tokens; "evidence", "ess" or "dead", if
    it weighed them; "verification", if it verified; "failure", the request ends with an error."""

    resampled: bool

    ancestors: list[int]
    """Ancestor of each particle, among those that drafted: itself without resampling, the winner in
    rounds that verify."""

    bonus: list[int | None]  # the target's own token after the kept ones; null where one had ended
    ended: list[bool]  # whether the sequence has ended, after the bonus token

    narrowed_to: list[int] | None = None
    """Ancestor of each particle, among those after the bonus tokens. Present where particles were
    dropped, to bound the lag or to draw the answer."""

    log_weights_after: list[float | None]  # at the start of the next round
    log_evidence: float | None  # log Z-hat so far, including the current mean weight
    emitted: list[int]  # tokens that all particles share now: what a stream sent in this round

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the answer that this round contains."""
        shared = self.begins[:1] if self.begins and len(set(self.begins)) == 1 else []
        return [*self.emitted_before, *shared, *self.emitted]


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Trace of one answer."""

    version: int = VERSION
    mode: str
    num_particles: int
    num_steps: int
    prompt_length: int  # in tokens
    rounds: list[TracedRound]
    emitted_after: list[int] = []  # after the last round: tokens of a prefill that ended the answer
    pieces: dict[str, str] = {}  # text of each token id, decoded alone; empty without a tokenizer
