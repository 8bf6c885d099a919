"""Play a round of plain decoding: the target adds a token to single particles without drafts.

It leaves out the steps of `play.ServedRound.play` that change nothing there. Texts and tables are
those after that round.
"""

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables
from sglang_smc.round.extras import Extra
from sglang_smc.round.result import Outcome
from sglang_smc.smc.ledger import KVLocations
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import Need
from sglang_smc.state.failures import Failure


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
        extras: of the shape; others are as in `play.ServedRound.play`.
    """
    rows = inputs.rows
    pair, ended, position = tables.particles.gather_single(rows)
    last = pair[:, 1]  # [G]
    settings = tables.requests.gather(rows)
    chains = _reserve(tables, inputs, shape, last, ended)._replace(reqs=reqs)
    p = tables.ops.distribution.of(
        target.chain_logits(chains).squeeze(2),
        settings.temperature,
        settings.greedy if Need.GREEDY in shape.needs else None,
        settings.filters if Need.FILTERS in shape.needs else None,
    )
    seeds = tables.ops.round_seeds(settings.seeds, position)
    places = position.unsqueeze(1)  # [G, 1]
    drawn, log_p = p.sample(tables.ops.uniforms(seeds, places, Purpose.BONUS))  # [G, 1]
    invalid = log_p.isnan().squeeze(1)
    failed = invalid & ~ended
    stays = ended | invalid
    pair = torch.where(stays.unsqueeze(1), pair, torch.cat([pair[:, 1:], drawn], dim=1))
    counts = (~stays).long()
    ends = settings.ends(drawn.unsqueeze(2), places.unsqueeze(2)).flatten()
    tables.particles.scatter_single(rows, pair, stays | ends, position + counts)
    weighs = settings.weighs
    if shape.budget is not None:
        _, _, is_exact = inputs.sizes
        weighs = weighs & (is_exact == 0)
    token = pair[:, 1:]  # [G, 1]
    return Outcome(
        tokens=token,
        counts=counts,
        new_seq_lens=inputs.committed + counts,
        last_emitted=token.squeeze(1),
        num_correct_drafts=torch.zeros_like(position),
        counters=tables.counters.add_plain_round(rows, failed, ~weighs),
        failure=failed * int(Failure.TARGET_LOGITS),
        first_tokens=None,
        extras={extra.name: extra.emit(rows, chains, None) for extra in extras},
    )


def _reserve(
    tables: Tables,
    inputs: RoundInputs,
    shape: RoundShape,
    last: torch.Tensor,
    ended: torch.Tensor,
) -> Chains:
    """Return the last tokens ``[G]`` as chains, with a slot for each that has not ``ended``."""
    rows = inputs.rows
    ledger = tables.ledger
    starts = inputs.committed.unsqueeze(1)  # [G, 1]
    particle_rows = ledger.particle_rows(rows, 1)  # [G, 1]
    locations = KVLocations(rows, inputs.committed, particle_rows, shape.max_tail + 1)
    # Without tails every slot of an arena is free, and its first is that of the next position.
    slots = ledger.table[rows.unsqueeze(1), starts].masked_fill(ended.unsqueeze(1), 0)  # [G, 1]
    ledger.tails[particle_rows, ledger.in_ring(starts)] = slots
    if tables.ops.kind == "torch":  # where attention reads the new token's slot with the prefix
        locations = locations._replace(committed=inputs.committed + 1, max_tail=0)
    return Chains(last.view(-1, 1, 1), starts, slots.long().unsqueeze(1), locations)
