"""A round watches how far its texts are from the target's law: one position of each request.

`smc.fidelity` has the statistics, and says why they mean what they do. What a draft step's law was
is known as the step is drafted and p's row only when the target has read the block, so the draft's
scores at the watched column are held until then. That takes the memory of one draft step, and
reads one of the K + 1 columns that a round works on anyway twice more: by arithmetic under 1 % of
a round on a GPU.
"""

import torch

from sglang_smc.drafts.ngram import as_law
from sglang_smc.ops.interface import Ops
from sglang_smc.round.batch import RoundBatch
from sglang_smc.round.decision import Drafts
from sglang_smc.smc.fidelity import Path, Watchable
from sglang_smc.smc.randomness import Purpose
from sglang_smc.state.population import Population
from sglang_smc.tokens.distribution import TokenDistribution


def choose(ops: Ops, batch: RoundBatch) -> Watchable:
    """Choose columns, before anything of the round is drawn."""
    settings = batch.settings
    numbers = ops.uniforms(settings.seeds, batch.furthest[:, :1], Purpose.WATCH)[:, 0]
    return Watchable(numbers, settings.num_steps, settings.normalized, settings.greedy)


def look(
    ops: Ops,
    batch: RoundBatch,
    before: Population,
    after: Population,
    ancestors: torch.Tensor,
    p: TokenDistribution,
    drafts: Drafts,
) -> Population:
    """Add what has come of the watched positions to the sums of the particles ``after`` a round.

    Args:
        before: the particles as the round began.
        ancestors: ``[G, N]`` among these, of each that the round has ended with.
        p: the target's law behind each prefix of each chain.
        drafts: with what they were drawn from where they are watched.
    """
    if drafts.watchable is None or drafts.held is None:  # nothing was drafted
        return after
    rows = drafts.held.unflatten(0, batch.starts.shape)
    q = TokenDistribution.of(ops, rows, batch.q_rules, batch.shape.kinds)
    if batch.matches is not None:  # what is held is q itself
        q = as_law(drafts.held, q)
    path = Path(ancestors, before.lengths, after.lengths, after.tokens)
    return after._replace(fidelity=ops.watch(after.fidelity, drafts.watchable, path, p, q))
