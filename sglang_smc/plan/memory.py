"""What a round holds in memory at its peak: logits, and what is made of them.

All else that a round makes, populations, weights and counts, is less than 1 % of it. What the
models take inside their passes is theirs, and left out.
"""

from __future__ import annotations

#: Bytes of a logit as an LM head makes it, and as SGLang hands it on.
PRODUCT_BYTES = 2
LOGIT_BYTES = 4


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
    # each draft was drawn from until it has decided.
    held = num_particles * num_steps * LOGIT_BYTES if verifies or mixes else 0
    beside = scored * PRODUCT_BYTES
    if mixes:  # all log-probabilities, or those of both modes, chosen from, at each particle
        beside = max(scored, 4 * num_particles) * LOGIT_BYTES
    return vocab_size * (held + scored * LOGIT_BYTES + beside)
