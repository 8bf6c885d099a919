"""What a round holds in memory at its peak: logits, and what is made of them.

All else that a round makes, populations, weights and counts, is less than 1 % of it. What the
models take inside their passes is theirs, and left out.
"""

from __future__ import annotations

#: Bytes of a logit as an LM head makes it, and as SGLang hands it on.
PRODUCT_BYTES = 2
LOGIT_BYTES = 4
#: Where all of the target's logits are made log-probabilities they are there three times: as they
#: came, over their temperature, and normalised. The second goes then.
NORMALISING_BYTES = 3 * 4
NORMALISED_BYTES = 2 * 4
#: What exact verification works with in a column: some twenty float64 numbers a token of the
#: vocabulary, of one text of each request.
COLUMN_BYTES = 180


def round_bytes(
    num_particles: int, num_steps: int, vocab_size: int, *, verifies: bool = False
) -> int:
    """Bytes of a request at a round's peak; a batch takes as much for each of its requests.

    A captured round takes as much for each request of the largest batch that is captured.

    Args:
        num_particles: N.
        num_steps: K.
        vocab_size: V.
        verifies: the round verifies, in modes exact, mixed and auto; else it weighs.
    """
    scored = num_particles * (num_steps + 1)  # rows of logits
    if not verifies:  # drafting holds K rows a particle, where scoring holds K + 1
        return vocab_size * scored * (PRODUCT_BYTES + LOGIT_BYTES)
    drafted = num_particles * num_steps * LOGIT_BYTES  # what each draft was drawn from
    deciding = max(scored * NORMALISING_BYTES, scored * NORMALISED_BYTES + COLUMN_BYTES)
    return vocab_size * (drafted + deciding)
