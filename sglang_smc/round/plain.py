"""Play a round of plain decoding: the target adds a token to single particles without drafts.

It leaves out the steps of `play.Round.play` that change nothing there. Texts and tables are those
after that round.
"""

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.round.batch import Need, RoundInputs, RoundShape, Tables
from sglang_smc.round.result import Outcome
from sglang_smc.smc.ledger import KVLocations
from sglang_smc.smc.randomness import Purpose
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
        models: the target and `play.Steps.routed`; others are as in `play.Round.play`.
    """
    (target, routed), (rows, committed, known) = models, inputs
    particles, ledger, ops = tables.particles, tables.ledger, tables.ops
    pair, ended, position = particles.gather_single(rows)
    last = pair[:, 1]
    settings = tables.requests.gather(rows)
    *_, is_exact = known.unbind()
    weighs = settings.weighs if shape.budget is None else settings.weighs & (is_exact == 0)
    # Without tails every slot of an arena is free, and its first is that of the next position.
    slots = ledger.reenter(rows, committed, ~ended, 1)  # [G, 1]
    locations = KVLocations(rows, committed, ledger.particle_rows(rows, 1), shape.max_tail + 1)
    starts, written = committed.unsqueeze(1), slots.unsqueeze(1)  # [G, 1], [G, 1, 1]
    chains = Chains(last.view(-1, 1, 1), starts, written, locations, reqs)
    p = ops.distribution.of(
        target.chain_logits(chains).squeeze(2),
        settings.temperature,
        settings.greedy if Need.GREEDY in shape.needs else None,
        settings.filters if Need.FILTERS in shape.needs else None,
    )
    seeds, places = ops.round_seeds(settings.seeds, position), position.unsqueeze(1)  # [G, 1]
    drawn, log_p = p.summed().sample(ops.uniforms(seeds, places, Purpose.BONUS))  # [G, 1]
    failed = log_p.squeeze(1).isnan() & ~ended
    grows = ~(ended | failed)
    pair = torch.where(grows.unsqueeze(1), torch.stack([last, drawn.squeeze(1)], dim=1), pair)
    ends = settings.ends(drawn.unsqueeze(2), places.unsqueeze(2)).flatten()
    particles.scatter_single(rows, pair, ended | failed | ends, position + grows)
    tokens = pair[:, 1]
    return Outcome(
        tokens=tokens.unsqueeze(1),
        counts=grows.long(),
        new_seq_lens=committed + grows,
        last_emitted=tokens,
        num_correct_drafts=torch.zeros_like(position),
        counters=tables.counters.add_plain_round(rows, failed, ~weighs),
        failure=failed * int(Failure.TARGET_LOGITS),
        first_tokens=None,
        particles=None,
        logprobs=None,
        experts=None if routed is None else (written, target.of_tokens(routed, written)),
    )
