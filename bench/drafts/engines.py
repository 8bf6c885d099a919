"""An engine for each proposal, one for the target alone, and SGLang's own with a draft model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drafts.grid import NUM_STEPS, STANDALONE, TARGET, proposal_of
from fidelity import engines
from fidelity.measure import Asker, Reply, Request

#: SGLang's own chain of K tokens: its tree of one branch, whose root is the last token.
CHAIN: dict[str, Any] = {
    "speculative_algorithm": STANDALONE,
    "speculative_num_steps": NUM_STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_STEPS + 1,
}


def settings(name: str) -> dict[str, Any]:
    """The keywords of `sgl.Engine` but for the models."""
    proposal = proposal_of(name)
    if name.startswith(STANDALONE):
        return engines.COMMON | CHAIN
    own = {} if proposal is None else engines.SMC | dict(proposal.settings)
    return engines.COMMON | own


def arguments(name: str, pair: Path) -> dict[str, Any]:
    """The keywords of `sgl.Engine` for the engine ``name``."""
    proposal, found = proposal_of(name), {**settings(name), "model_path": str(pair / TARGET)}
    if proposal is not None and proposal.folder is not None:
        found["speculative_draft_model_path"] = str(pair / proposal.folder)
    return found


class ForgetfulAsker(engines.EngineAsker):
    """Forgets what was said before: cells ask the same problems, and matches would know them."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """As `EngineAsker.ask`, from a server that has said nothing yet."""
        self._engine.flush_cache()
        yield from super().ask(requests)


@contextlib.contextmanager
def running(name: str, pair: Path) -> Iterator[Asker]:
    """The engine ``name`` for the ``with`` block."""
    proposal = proposal_of(name)
    forgets = proposal is not None and proposal.kind == "ngram"
    asker = ForgetfulAsker if forgets else engines.EngineAsker
    with engines.started(arguments(name, pair), asker) as running:
        yield running
