"""Capture passes of a draft, before any request, for `LayerChoice` to compare and time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from sglang_smc.models.recorder import Record
from sglang_smc.proposers.base import DraftProposer, DraftSlots
from sglang_smc.proposers.layer_choice import CapturedWay, LayerChoice, LayerTrial
from sglang_smc.smc.ledger import KVLocations, Ledger
from sglang_smc.smc.ops import MOST_SKINNY_ROWS

_COLUMNS = 4  # of slots: of the last two tokens, and of two drafts


def trials(
    choice: LayerChoice,
    draft: DraftProposer,
    ledger: Ledger,
    sizes: Sequence[int],
    vocab_size: int,
    record: Record,
    in_order: Callable[[], AbstractContextManager[None]],
) -> Iterator[LayerTrial]:
    """Yield the pass that a draft makes for each number of requests, if its rows may be fused.

    That is the pass after its first draft token, or, of a draft that makes none, the first.

    Args:
        sizes: numbers of requests, ascending.
        in_order: has launches wait for each other.
    """
    for num_groups in sizes:
        at = _stand_ins(ledger, num_groups)
        both = at.slots.new_zeros(*at.slots.shape[1:], 2)  # [G, N, 2] tokens
        first = partial(draft.first_logits, both, at)
        rows_of_first = choice.rows_of(first)  # heads go on from its states
        tokens = both[..., 0].clone()
        run = partial(draft.next_logits, 1, tokens, at)
        num_rows = choice.rows_of(run)
        if not num_rows:
            num_rows = rows_of_first
            tokens = both
            run = first
        if not 0 < num_rows <= MOST_SKINNY_ROWS:
            return

        def way(fuses: bool, run: Callable[[], torch.Tensor] = run) -> CapturedWay:
            choice.trying(fuses, run)  # warm-up, see `Record`
            return CapturedWay(*choice.trying(fuses, lambda: record(run)))

        sglang = way(False)
        with in_order():
            ordered = way(True)
        yield LayerTrial(num_rows, tokens, vocab_size, sglang, ordered, way(True))


def _stand_ins(ledger: Ledger, num_groups: int) -> DraftSlots:
    """Return slots of requests with a prompt of one token, whose particles share no other slot.

    What is written there no request has yet, and each writes its own before it reads.
    """
    num_particles = ledger.num_particles
    rows = torch.arange(1, 1 + num_groups, device=ledger.device)
    count = (_COLUMNS - 1) * num_groups * num_particles
    own = 1 + torch.arange(count, device=ledger.device) % (len(ledger.rank) - 1)
    own = own.view(_COLUMNS - 1, num_groups, num_particles)
    slots = torch.cat([torch.zeros_like(own[:1]), own])  # [K + 2, G, N]
    positions = torch.arange(_COLUMNS, device=ledger.device).view(-1, 1, 1).expand_as(slots)
    particles = ledger.particle_rows(rows, num_particles)
    entries = ledger.in_ring(positions[1:])
    ledger.tails[particles.expand_as(entries), entries] = own.to(ledger.tails.dtype)
    ledger.table[rows, 0] = 0
    locations = KVLocations(rows, torch.ones_like(rows), particles, max_tail=_COLUMNS)
    return DraftSlots(slots, positions, locations, ledger)
