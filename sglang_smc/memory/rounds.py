"""Bytes that a round holds at its peak, and how many requests' rounds fit into what is free.

A round's peak is logits, and what is made of them: all else that it makes, populations, weights and
counts, is less than 1 % of that. What the models take inside their passes is theirs, and left out.
"""

from typing import NamedTuple

#: Bytes of a logit as an LM head makes it, and as SGLang hands it on.
PRODUCT_BYTES = 2
LOGIT_BYTES = 4

#: Of what is free before rounds are recorded. The rest is for prefill and for what is not counted.
SHARE = 0.8
#: Of that, for rounds that are launched call by call beside the recorded ones.
SHARE_OF_LAUNCHED = 0.25
#: Requests of such a round: their passes are recorded, too, and keep logits of their own.
MOST_LAUNCHED = 16


def round_bytes(
    num_particles: int,
    num_steps: int,
    vocab_size: int,
    *,
    verifies: bool = False,
    mixes: bool = False,
) -> int:
    """Bytes of a request at a round's peak; a batch takes as much for each of its requests.

    A captured round takes as much for each request of the largest batch that is captured.

    Args:
        num_particles: N.
        num_steps: K.
        vocab_size: V.
        verifies: the round verifies, in modes exact, mixed and auto; else it weighs.
        mixes: it does all that a device can: modes side by side, and log-probabilities of the
            likeliest tokens.
    """
    scored = num_particles * (num_steps + 1)  # rows of logits
    # Drafting alone holds K rows a particle, where scoring holds K + 1. Who verifies holds what
    # each draft was drawn from until it has decided. One column's rows are held by who watches.
    columns_held = num_steps * (verifies or mixes) + (num_steps > 0)
    held = num_particles * columns_held * LOGIT_BYTES
    beside = scored * PRODUCT_BYTES
    if mixes:  # all log-probabilities, or those of both modes, chosen from, at each particle
        beside = max(scored, 4 * num_particles) * LOGIT_BYTES
    return vocab_size * (held + scored * LOGIT_BYTES + beside)


class Room(NamedTuple):
    """The most requests of one round that memory holds, by how the round is played."""

    launched: int  # call by call
    of_rounds: int  # recorded, of the kinds that most requests play
    of_any: int  # recorded, of the kind that does all that a device can

    @classmethod
    def beside_recordings(cls, free: int, bytes_of_rounds: int, bytes_of_any: int) -> "Room":
        """Divide ``free`` bytes between recordings, which share one pool, and launched rounds.

        Args:
            free: before anything is recorded.
            bytes_of_rounds, bytes_of_any: of a request, as `round_bytes` counts them.
        """
        budget = SHARE * free
        launched = int(SHARE_OF_LAUNCHED * budget // bytes_of_any)
        launched = min(max(launched, 1), MOST_LAUNCHED)
        pool = max(budget - launched * bytes_of_any, 0)
        return cls(launched, int(pool // bytes_of_rounds), int(pool // bytes_of_any))

    @classmethod
    def without_recordings(cls, free: int, bytes_of_any: int) -> "Room":
        """Give all of ``free`` bytes' share to launched rounds; one request plays in any case."""
        return cls(max(int(SHARE * free // bytes_of_any), 1), 0, 0)
