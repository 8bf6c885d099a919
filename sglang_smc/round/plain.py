"""Play a round of plain decoding: the target adds a token to single particles without drafts.

It leaves out the steps of `play.Round.play` that change nothing there. Texts and tables are those
after that round.
"""

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables
from sglang_smc.round.result import Outcome
from sglang_smc.smc.ledger import KVLocations
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import Need
from sglang_smc.state.failures import Failure


def play_plainly(
    models: tuple[ParticleForward, torch.Tensor | None],
    tables: Tables,
    inputs: RoundInputs,
    shape: RoundShape,
    reqs: Sequence[Req],
) -> Outcome:
    """Play a round of a shape without deciders.

    Args:
        models: the target and `play.Round.routed`; others are as in `play.Round.play`.
    """
    target, routed = models
    rows, committed, known = inputs
    particles = tables.particles
    ledger = tables.ledger
    ops = tables.ops
    pair, ended, position = particles.gather_single(rows)
    last = pair[:, 1]  # [G]
    starts = committed.unsqueeze(1)  # [G, 1]
    settings = tables.requests.gather(rows)
    own = ledger.particle_rows(rows, 1)  # [G, 1]
    locations = KVLocations(rows, committed, own, shape.max_tail + 1)
    # Without tails every slot of an arena is free, and its first is that of the next position.
    slots = ledger.table[rows.unsqueeze(1), starts].masked_fill(ended.unsqueeze(1), 0)  # [G, 1]
    ledger.tails[own, ledger.in_ring(starts)] = slots
    written = slots.long().unsqueeze(1)  # [G, 1, 1]
    if ops.kind == "torch":  # where attention reads the new token's slot with the prefix
        locations = locations._replace(committed=committed + 1, max_tail=0)
    chains = Chains(last.view(-1, 1, 1), starts, written, locations, reqs)
    p = ops.distribution.of(
        target.chain_logits(chains).squeeze(2),
        settings.temperature,
        settings.greedy if Need.GREEDY in shape.needs else None,
        settings.filters if Need.FILTERS in shape.needs else None,
    )
    seeds = ops.round_seeds(settings.seeds, position)
    places = position.unsqueeze(1)  # [G, 1]
    drawn, log_p = p.sample(ops.uniforms(seeds, places, Purpose.BONUS))  # [G, 1]
    goes_on = ~ended
    grows = goes_on & ~log_p.squeeze(1).isnan()
    token = torch.where(grows, drawn.squeeze(1), last)
    pair = torch.stack([torch.where(grows, last, pair[:, 0]), token], dim=1)
    ends = settings.ends(drawn.unsqueeze(2), places.unsqueeze(2)).flatten()
    particles.scatter_single(rows, pair, ~grows | ends, position + grows)
    weighs = settings.weighs
    failed = goes_on ^ grows
    counts = grows.long()
    if shape.budget is not None:
        *_, is_exact = known.unbind()
        weighs = weighs & (is_exact == 0)
    return Outcome(
        tokens=token.unsqueeze(1),
        counts=counts,
        new_seq_lens=committed + counts,
        last_emitted=token,
        num_correct_drafts=torch.zeros_like(position),
        counters=tables.counters.add_plain_round(rows, failed, ~weighs),
        failure=failed * int(Failure.TARGET_LOGITS),
        first_tokens=None,
        particles=None,
        logprobs=None,
        experts=None if routed is None else (written, target.of_tokens(routed, written)),
    )
