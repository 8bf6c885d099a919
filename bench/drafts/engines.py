"""Start an engine for a proposal, for the target alone, or for SGLang's own speculation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from answers import COMMON, Asker, started
from drafts.grid import NUM_STEPS, STANDALONE, TARGET, proposal_of
from fidelity.measure import SMC

#: SGLang's own chain of K tokens: a tree with one branch; its root is the last token.
CHAIN: dict[str, Any] = {
    "speculative_algorithm": STANDALONE,
    "speculative_num_steps": NUM_STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_STEPS + 1,
}


def settings(name: str) -> dict[str, Any]:
    """Return the keywords of `sgl.Engine` except the models."""
    proposal = proposal_of(name)
    if name.startswith(STANDALONE):
        return COMMON | CHAIN
    return COMMON | ({} if proposal is None else SMC | dict(proposal.settings))


@contextlib.contextmanager
def running(name: str) -> Iterator[Asker]:
    """Start the engine ``name`` for the ``with`` block."""
    proposal = proposal_of(name)
    folder, kind = (proposal.folder, proposal.kind) if proposal else (None, None)
    with started(settings(name), TARGET, folder, forgets=kind == "ngram") as asker:
        yield asker
