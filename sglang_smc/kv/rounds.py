"""Estimate the peak memory of a round, and how many requests' rounds fit into free memory.

The peak consists of logits and tensors of their size: populations, weights and counts are less than
1 % of that. Memory inside the models' passes is not included.
"""

from typing import NamedTuple

#: Bytes of a logit as the LM head computes it, and as SGLang returns it.
PRODUCT_BYTES = 2
LOGIT_BYTES = 4

#: Share of the free memory before capture. The rest is for prefill and other tensors.
SHARE = 0.8
#: Share of that for rounds that are launched without a graph, beside the captured ones.
SHARE_OF_LAUNCHED = 0.25
#: Maximum requests of such a round: its passes are captured, too, and keep logits of their own.
MOST_LAUNCHED = 16


def round_bytes(
    num_particles: int,
    num_steps: int,
    vocab_size: int,
    *,
    verifies: bool = False,
    mixes: bool = False,
) -> int:
    """Return the bytes of one request at a round's peak; a batch takes a multiple of it.

    A captured round takes it for each request of the largest captured batch.

    Args:
        num_particles: N.
        num_steps: K.
        vocab_size: V.
        verifies: the round verifies, in modes exact and auto; else it weighs.
        mixes: the round supports all options that need no host: different modes in one batch, and
            log-probabilities of the likeliest tokens.
    """
    scored = num_particles * (num_steps + 1)  # rows of logits
    # Drafting alone holds K rows per particle, scoring K + 1. Verification holds the draft
    # distributions until it has decided. Fidelity measurement holds one column's rows.
    columns_held = num_steps * (verifies or mixes) + (num_steps > 0)
    held = num_particles * columns_held * LOGIT_BYTES
    beside = scored * PRODUCT_BYTES
    if mixes:  # all log-probabilities, or those of both modes for each particle
        beside = max(scored, 4 * num_particles) * LOGIT_BYTES
    return vocab_size * (held + scored * LOGIT_BYTES + beside)


class Room(NamedTuple):
    """The most requests of one round that fit in memory, by the way it is played."""

    launched: int  # launched without a graph
    of_rounds: int  # captured, of the kinds that most requests use
    of_any: int  # captured, of the kind with all options that need no host

    @classmethod
    def beside_recordings(cls, free: int, bytes_of_rounds: int, bytes_of_any: int) -> "Room":
        """Divide ``free`` bytes between captured graphs, which share one pool, and launched rounds.

        Args:
            free: bytes before capture.
            bytes_of_rounds, bytes_of_any: return values of `round_bytes`, per request.
        """
        budget = SHARE * free
        launched = int(SHARE_OF_LAUNCHED * budget // bytes_of_any)
        launched = min(max(launched, 1), MOST_LAUNCHED)
        pool = max(budget - launched * bytes_of_any, 0)
        return cls(launched, int(pool // bytes_of_rounds), int(pool // bytes_of_any))
