"""Return log-probabilities of emitted tokens to SGLang, where some request asks for them."""

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.models.chains import Chains
from sglang_smc.round.batch import RoundShape
from sglang_smc.round.extras import Extra, ReadRound, Stages
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.population import Population, TailLogprobs
from sglang_smc.smc.steps import Batch
from sglang_smc.state.logprobs import Emitted, LogprobTable
from sglang_smc.state.request import state_of
from sglang_smc.state.stream import set_logprob


class ReturnedLogprobs(Extra):
    """Log-probabilities of tails, computed as tokens are appended and returned as they are emitted.

    Particles carry them, since a token's particle may be copied before the token is emitted.
    """

    name = "return_logprob"

    def __init__(self, table: LogprobTable) -> None:
        self._table = table

    def load(self, rows: torch.Tensor, shape: RoundShape, before: Population) -> Population:
        """Return the particles with the log-probabilities of their tails."""
        return self._table.gather(rows, before, shape.logprobs)

    def score(
        self,
        batch: Batch,
        before: Population,
        after: Population,
        ancestors: torch.Tensor,
        p: TokenDistribution,
    ) -> Population:
        """Score the tokens that the round has appended."""
        return self._table.score_tails(
            batch.settings.rows,
            before=before,
            population=after,
            ancestors=ancestors,
            p=p,
            temperature=batch.settings.temperature,
        )

    def emit(self, rows: torch.Tensor, chains: Chains, stages: Stages | None) -> Emitted:
        """Return the log-probabilities of each group's first particle."""
        assert stages is not None, "asked for by a request"
        return self._table.emitted(rows, stages.end.population)

    def fields(self, returned: dict[str, Any]) -> dict[str, Any]:
        """Give SGLang's result the output that `deliver` fills."""
        return {"logits_output": LogitsProcessorOutput(next_token_logits=None)}

    def deliver(self, found: Emitted, read: ReadRound) -> None:
        """Store the emitted tokens' log-probabilities in SGLang's request fields."""
        for group, req in enumerate(read.reqs):
            shared = state_of(req).open_token.shared
            if shared is not None and req.return_logprob:  # closed in this round
                set_logprob(req, len(req.output_ids) - 1, shared, float(found.first[group]))
        deliver(read.output, found.tails, list(map(len, read.emitted)), list(read.reqs))


def deliver(
    output: LogitsProcessorOutput, logprobs: TailLogprobs, counts: list[int], reqs: list[Req]
) -> None:
    """Store the emitted tokens' log-probabilities in SGLang's request fields, on the host.

    Args:
        output: of the round; SGLang reads the same number of tokens for each request.
        logprobs: ``[G, T, ...]``.
        counts: ``[G]`` tokens emitted.
    """
    emitted = TailLogprobs._make(column[:, : max(counts)] for column in logprobs)
    tops = [req.logprob.top_logprobs_num if req.return_logprob else 0 for req in reqs]
    ids = [(req.return_logprob and req.logprob.token_ids_logprob) or [] for req in reqs]
    output.next_token_logprobs = emitted.own
    output.next_token_top_logprobs_val = _rows(emitted.top, tops)
    output.next_token_top_logprobs_idx = _rows(emitted.top_ids, tops)
    output.next_token_token_ids_logprobs_val = _rows(emitted.listed, [len(few) for few in ids])
    output.next_token_token_ids_logprobs_idx = [few for few in ids for _ in range(max(counts))]


def _rows(values: torch.Tensor, widths: list[int]) -> list[list[float] | torch.Tensor]:
    """Split ``[G, C, W]`` into one tensor ``[widths[g]]`` per request and token."""
    return [
        row[:width] for of_req, width in zip(values, widths, strict=True) for row in of_req.unbind()
    ]
