"""Choose N and K of a server that is given none, by its draft and its target.

Server, `doctor`, `plan` and pages read this one table. Each row names the file below
`bench/results` that its numbers come from. A server that adapts takes the largest N and K that pay
at any load, since it goes down from them alone; one that does not takes what pays at most loads.
This module imports no SGLang.
"""

from typing import NamedTuple

from sglang_smc.drafts import reading
from sglang_smc.drafts.heads.base import Config
from sglang_smc.options.server import DEFAULTS, SMCConfig

NGRAM = "ngram"
OWN = "own"
"""Kinds of drafts beside `base.Kind`: n-gram matches, and a class of the operator's."""

_MANY = 2  # experts of a mixture, at least


class SizesRow(NamedTuple):
    """N and K for a kind of draft in modes that verify."""

    draft: str  # in words
    num_particles: int
    most_steps: int  # K of a server that adapts
    steps: int  # K of one that does not
    source: str  # below bench/results
    reason: str


class Chosen(NamedTuple):
    """N and K of a server, and where they come from."""

    num_particles: int
    num_steps: int
    reason: str

    def told(self, server: SMCConfig) -> str:
        """Return where a server's N and K come from, in words."""
        pairs = (self.num_particles, server.num_particles), (self.num_steps, server.num_steps)
        given = [name for name, (own, one) in zip("NK", pairs, strict=True) if own != one]
        if len(given) == len(pairs):
            return "as given"
        return "; ".join([*(f"{name} as given" for name in given), self.reason])


_HEAD = SizesRow(
    draft="an EAGLE head",
    num_particles=8,
    # On an H200 one request is fastest with 8 x 8 where drafts are kept as in real text, and with
    # 8 x 16 where they are kept as the shipped head's: 1.01 and 1.23 times 8 x 8. From 8 x 16 down
    # every load is within 3 % of the best fixed N x K, from 4 x 16 it is 14 % off at one.
    most_steps=16,
    # Fixed, 8 x 16 loses a quarter to 8 x 8 at eight requests of real text.
    steps=8,
    source="load/load.md",
    reason="most tokens a second at one request, of texts that are drafted well or badly",
)
ROWS: dict[str, SizesRow] = {
    "eagle": _HEAD,
    "eagle3": _HEAD,
    # A layer is a sixteenth of such a target: a pass costs a round of 8 x 8 a sixteenth of its
    # time. 4 x 17 makes 1.25 times the tokens of 8 x 8 in 1.64 times its time.
    "model": SizesRow(
        draft="a draft model",
        num_particles=8,
        most_steps=8,
        steps=8,
        source="trees/trees.md, gpu/gpu.md",
        reason="longer chains cost more passes than they keep tokens",
    ),
    # Measured with K = 8 alone. A pass reads the target's whole LM head: two of an EAGLE-3 head's.
    "mtp": SizesRow(
        draft="an MTP layer",
        num_particles=8,
        most_steps=8,
        steps=8,
        source="drafts/drafts.md",
        reason="8.2 of 9 tokens a pass, of the shipped layer",
    ),
    # One pass drafts all K: the whole block, while rows of the target are nearly free. N = 8 keeps
    # 1.2 (DSpark) and 1.35 times (DFlash) what one chain does.
    "dflash": SizesRow(
        draft="a block head",
        num_particles=8,
        most_steps=16,
        steps=8,
        source="chains/chains.md",
        reason="the block's length, since one pass drafts all of it",
    ),
    # No pass drafts: rows alone cost. N = 8 makes 1.68 tokens a pass, N = 1 makes 1.56.
    NGRAM: SizesRow(
        draft="n-gram matches",
        num_particles=8,
        most_steps=8,
        steps=8,
        source="drafts/drafts.md",
        reason="matches cost rows of the target alone",
    ),
    OWN: SizesRow(
        draft="a drafter of its own",
        num_particles=8,
        most_steps=8,
        steps=8,
        source="fidelity/fidelity.md",
        reason="those of a draft model",
    ),
}

# Each row visits experts of its own, whose weights are read: a trained mixture's tree of 8 x 8
# visits 3.2 times the experts of 1 x 4, and on a CPU 1 x 4 decodes 1.7 times as fast as 8 x 4
# (speed/cpu-experts).
MIXTURE = SizesRow(
    draft="any draft",
    num_particles=1,
    most_steps=4,
    steps=4,
    source="experts/experts.md, speed/cpu-experts/speed.md",
    reason="in a mixture of experts each further row reads experts of its own",
)

# In mode smc N is the fidelity: KL and tilt were measured at N = K = 8.
WEIGHED = SizesRow(
    draft="any draft",
    num_particles=DEFAULTS.num_particles,
    most_steps=DEFAULTS.num_steps,
    steps=DEFAULTS.num_steps,
    source="fidelity/fidelity.md",
    reason="in mode smc N sets the fidelity, which was measured there",
)


def choose(
    draft: str, config: Config | None, server: SMCConfig, *, is_mixture: bool = False
) -> Chosen:
    """Return N and K for a kind of draft.

    Args:
        draft: a key of `ROWS`.
        config: the draft's, as of its config.json; None where it has none.
        server: its mode, and whether it adapts.
        is_mixture: whether the target is a mixture of experts.
    """
    own = ROWS[draft]
    verifying = MIXTURE if is_mixture else own
    row = WEIGHED if server.weighs else verifying
    num_steps = row.most_steps if server.adapts else row.steps
    told = f"{own.draft}, {row.reason} (bench/results/{row.source})"
    if config is None:
        return Chosen(row.num_particles, num_steps, told)
    if proposed := reading.num_tokens(config):
        told = f"{told}; K as the draft's checkpoint proposes"
        return Chosen(row.num_particles, proposed, told)
    block = reading.proposed_steps(config) or num_steps
    return Chosen(row.num_particles, min(num_steps, block), told)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_mixture(config: Config) -> bool:
    """Return whether a target's config.json is of a mixture of experts."""
    text = config.get("text_config") or {}
    counts = [one.get(name) or 0 for one in (config, text) for name in _COUNTS]
    return any(isinstance(count, int) and count >= _MANY for count in counts)
