"""Play a round of plain decoding: the target adds tokens to single particles without drafts.

It leaves out the steps of `play.ServedRound.play` that change nothing there. Texts and tables are
those after as many of its rounds as the target has passes here: several passes share what the host
does once a round.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables
from sglang_smc.round.extras import Extra
from sglang_smc.round.result import Outcome
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import KVLocations
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import BatchSettings, Need
from sglang_smc.state.failures import Failure
from sglang_smc.state.request import state_of


def play_plainly(
    target: ParticleForward,
    tables: Tables,
    inputs: RoundInputs,
    shape: RoundShape,
    reqs: Sequence[Req],
    extras: Sequence[Extra],
) -> Outcome:
    """Play a round of a shape without deciders.

    Args:
        extras: of the shape; they return what one pass leaves. Others are as in
            `play.ServedRound.play`.
    """
    rows = inputs.rows
    settings = tables.requests.gather(rows)
    pair, ended, position = tables.particles.gather_single(rows)
    now = Sequences(pair, position, ended)
    committed = inputs.committed
    num_passes = 1 if extras else min((state_of(req).num_passes for req in reqs), default=1)
    drawn = []
    failures = []
    for _ in range(num_passes):
        chains = _reserve(tables, rows, committed, shape, now)._replace(reqs=reqs)
        p = tables.ops.distribution.of(
            target.chain_logits(chains).squeeze(2),
            settings.temperature,
            settings.greedy if Need.GREEDY in shape.needs else None,
            settings.filters if Need.FILTERS in shape.needs else None,
        )
        now, failed = _extend(tables.ops, settings, now, p)
        counts = now.position - position
        committed = inputs.committed + counts
        drawn.append(now.last)
        failures.append(failed)
    failed = reduce(torch.logical_or, failures)
    several = num_passes > 1
    played = counts + failed if several else None
    tables.particles.scatter_single(rows, now.pair, now.ended, now.position)
    weighs = settings.weighs
    if shape.budget is not None:
        _, _, is_exact = inputs.sizes
        weighs = weighs & (is_exact == 0)
    return Outcome(
        tokens=torch.stack(drawn, dim=1) if several else now.pair[:, 1:],  # [G, M]
        counts=counts,
        new_seq_lens=committed,
        last_emitted=now.last,
        num_correct_drafts=torch.zeros_like(position),
        counters=tables.counters.add_plain_rounds(rows, failed, ~weighs, played),
        failure=failed * int(Failure.TARGET_LOGITS),
        first_tokens=None,
        extras={extra.name: extra.emit(rows, chains, None) for extra in extras},
    )


class Sequences(NamedTuple):
    """Sequences of G requests of a single particle each."""

    pair: torch.Tensor  # [G, 2] their last two tokens
    position: torch.Tensor  # [G] int64 tokens of their outputs
    ended: torch.Tensor  # [G] bool

    @property
    def last(self) -> torch.Tensor:
        """Return the last tokens ``[G]``."""
        return self.pair[:, 1]


def _extend(
    ops: Ops, settings: BatchSettings, before: Sequences, p: TokenDistribution
) -> tuple[Sequences, torch.Tensor]:
    """Extend each sequence that has not ended by a token of ``p``.

    Returns:
        The sequences, and ``[G]`` which of them have ended because their ``p`` is invalid.
    """
    seeds = ops.round_seeds(settings.seeds, before.position)
    places = before.position.unsqueeze(1)  # [G, 1]
    drawn, log_p = p.sample(ops.uniforms(seeds, places, Purpose.BONUS))  # [G, 1]
    invalid = log_p.isnan().squeeze(1)
    stays = before.ended | invalid
    longer = torch.cat([before.pair[:, 1:], drawn], dim=1)
    ends = settings.ends(drawn.unsqueeze(2), places.unsqueeze(2)).flatten()
    after = Sequences(
        pair=torch.where(stays.unsqueeze(1), before.pair, longer),
        position=before.position + ~stays,
        ended=stays | ends,
    )
    return after, invalid & ~before.ended


def _reserve(
    tables: Tables,
    rows: torch.Tensor,
    committed: torch.Tensor,
    shape: RoundShape,
    now: Sequences,
) -> Chains:
    """Return the last tokens as chains, with a slot for each sequence that has not ended.

    Args:
        rows, committed: ``[G]`` as in `RoundInputs`, after the passes of this round.
    """
    ledger = tables.ledger
    starts = committed.unsqueeze(1)  # [G, 1]
    particle_rows = ledger.particle_rows(rows, 1)  # [G, 1]
    locations = KVLocations(rows, committed, particle_rows, shape.max_tail + 1)
    # Without tails every slot of an arena is free, and its first is that of the next position.
    slots = ledger.table[rows.unsqueeze(1), starts]  # [G, 1]
    slots = slots.masked_fill(now.ended.unsqueeze(1), 0)
    ledger.tails[particle_rows, ledger.in_ring(starts)] = slots
    if tables.ops.kind == "torch":  # where attention reads the new token's slot with the prefix
        locations = locations._replace(committed=committed + 1, max_tail=0)
    return Chains(now.last.view(-1, 1, 1), starts, slots.long().unsqueeze(1), locations)
