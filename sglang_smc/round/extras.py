"""Return more than tokens from a round, where some request asks for it.

An extra is one class: a new one takes its own file, the key of `RequestConfig` that asks for it,
and the list in `ServedRound`. Methods that it does not need do nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.round.batch import RoundShape
from sglang_smc.smc.deciding import Drafts
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.population import Narrowed, Population
from sglang_smc.smc.steps import Batch
from sglang_smc.smc.weighing import Decision


class Stages(NamedTuple):
    """Hold what the steps of a round return; places beyond a request's own N are undefined."""

    resized_from: torch.Tensor | None  # [G, N] ancestors, where N has changed for some request
    start: Population  # at the start
    revalued: Population  # at the start, with the latest potential values
    drafts: Drafts
    decision: Decision
    failure: torch.Tensor  # [G] int64 `Failure`
    extended: Population  # with the kept draft tokens, after resampling
    continued: Population  # after the bonus token
    end: Narrowed


class ReadRound(NamedTuple):
    """Hold what the host has read of a round, after rules have read its tokens."""

    reqs: Sequence[Req]
    live: Sequence[bool]  # neither retracted nor finished before, nor stuck
    emitted: Sequence[list[int]]  # in SGLang's lists
    totals: Sequence[list[float]]  # `Counters` of each
    output: Any  # SGLang's `LogitsProcessorOutput`; None where no extra has made one


class Extra(ABC):
    """Something that a round returns beside tokens; a round calls the methods in their order.

    All but the last three are of the device, and captured with the round.
    """

    name: str  # in `RoundShape.extras`: the request's key that asks for it
    #: Every round of the server returns it.
    always = False
    #: It reads what a pass of the target leaves in place, which a replay of that pass overwrites.
    reads_pass = False

    def load(self, rows: torch.Tensor, shape: RoundShape, before: Population) -> Population:
        """Return the particles of the requests in ``rows`` ``[G]`` with what they carry of it."""
        return before

    def score(
        self,
        batch: Batch,
        before: Population,
        after: Population,
        ancestors: torch.Tensor,
        p: TokenDistribution,
    ) -> Population:
        """Return the particles after their bonus tokens, scored; see `steps.measure`."""
        return after

    @abstractmethod
    def emit(self, rows: torch.Tensor, chains: Chains, stages: Stages | None) -> Any:
        """Return what the host reads: tensors of G groups, in tuples, lists and dictionaries.

        Args:
            rows: ``[G]`` of the requests, in tables.
            chains: what the target has read.
            stages: None in plain decoding, in whose rounds requests ask for no extra.
        """

    def fields(self, returned: dict[str, Any]) -> dict[str, Any]:
        """Return fields of SGLang's result; ``returned`` is what extras have emitted, by name."""
        return {}

    def keep(self, found: Any, reqs: Sequence[Req], live: Sequence[bool]) -> None:
        """Keep what the round's start is read for, before open tokens are closed.

        Args:
            found: what `emit` returned, on the host.
            live: requests that are neither retracted nor finished.
        """
        return None

    def deliver(self, found: Any, read: ReadRound) -> None:
        """Hand over what `emit` returned, on the host."""
        return None
