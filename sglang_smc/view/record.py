"""The record of one answer, round by round: what a request gets for ``"trace": true``.

All lists are by particle, in the order of their places, if nothing else is said. Numbers that are
minus infinity, of particles that have died, are null.
"""

import msgspec

VERSION = 1


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One round of one request.

    A round drafts, scores, weighs; `ancestors` then hand down their texts; each particle that goes
    on takes a bonus token; `narrowed_to` settles what lags behind, or draws the answer.
    """

    emitted_before: list[int] = []
    """Ahead of `begins`: tokens of prefills behind which the request was retracted before it had a
    round. They are of the answer."""

    begins: list[int] | None = None
    """The first round behind a prefill: the token that each particle begins with. Particles that
    there were before are gone: a retraction drops all that was not emitted."""

    resized_from: list[int] | None = None
    """Where N has changed since the round before: which of those particles each one was."""

    log_weights_before: list[float | None]
    """Log-weights, not normalised, as the round begins."""

    drafted: list[list[int]]
    """Tokens that the draft proposed; none for a particle that had ended."""

    kept: list[int]
    """How many of these each particle kept; where rounds verify, of its ancestor's."""

    log_weights: list[float | None]
    """Log-weights with what the round kept, before resampling."""

    log_potentials: list[float | None] | None = None
    """What potentials added to these in this round."""

    ess: float
    """Effective sample size of `log_weights`, from 1 to N; where rounds verify, of the weights that
    the columns they keep have. 0 where logits mean nothing."""

    log_block_evidence: float | None
    """Log of the factor by which the kept columns multiplied the mean weight."""

    cut: str
    """Why the round kept no more: "none", it kept all that was drafted; "evidence", "ess" or "dead"
    of mode smc; "verification" of the others; "failure", the request ends with an error."""

    resampled: bool

    ancestors: list[int]
    """Among the particles as the round drafted them: of whom each is a copy. Itself where nothing
    was resampled; the winner where rounds verify."""

    bonus: list[int | None]
    """The target's own token, behind what was handed down; null where the text had ended."""

    ended: list[bool]
    """Whose text is complete, behind the bonus token."""

    narrowed_to: list[int] | None = None
    """Among the particles behind their bonus tokens: of whom each is a copy now. There where some
    went, for the lag's sake or because the answer was drawn."""

    log_weights_after: list[float | None]
    """What the next round begins with."""

    log_evidence: float | None
    """log Z-hat so far, with what weights have gained since some was banked."""

    emitted: list[int]
    """Tokens that all particles came to agree on: what a stream had of this round."""

    @property
    def told(self) -> list[int]:
        """The tokens of the answer that this record has."""
        shared = self.begins[:1] if self.begins and len(set(self.begins)) == 1 else []
        return [*self.emitted_before, *shared, *self.emitted]


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer."""

    version: int = VERSION
    mode: str
    num_particles: int
    num_steps: int
    prompt_length: int
    """Tokens."""

    rounds: list[RoundRecord]
    emitted_after: list[int] = []
    """Tokens of the answer behind its last round: of a prefill that ended it."""

    pieces: dict[str, str] = {}
    """What each token id of the record reads, by itself; empty without a tokenizer."""
