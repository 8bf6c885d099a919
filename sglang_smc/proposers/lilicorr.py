"""Draft with LiLiCorr heads (arXiv 2608.20530): DFlash blocks with a lattice of candidates.

The likeliest tokens of each row, 16 or fewer, are its candidates. A small transformer reads those
of all rows at once, and gives each one vector for the token before it and one for that behind it. q
is the softmax over a row's candidates, of the cosines between their vectors and that of the token
drafted before; for the first row, that of the text's last state. Each particle has a lattice of its
own, as it has a block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch.nn.functional import normalize, silu

from sglang_smc import upstream
from sglang_smc.drafts.heads.lilicorr import LATTICE
from sglang_smc.kv.transfer import on_device
from sglang_smc.models.chains import Chains
from sglang_smc.proposers.base import DraftContext, DraftSlots
from sglang_smc.proposers.dflash import BlockForward, BlockHead, among
from sglang_smc.proposers.dflash2 import ConvolvedForward
from sglang_smc.proposers.hidden_states import StateTable
from sglang_smc.smc.ledger import Ledger

_SETTINGS = (
    *("candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim"),
    *("vector_eps", "logit_scale"),
)


class LiLiCorrHead(BlockHead):
    """A draft by a block head with a lattice; arguments but the last four as of `BlockHead`.

    Args:
        lattice: SGLang's `LiLiCorrHead`.
        table: of the target's states, as the block's layers read them, before each block.
        num_particles: N of the server.
    """

    shown = "LiLiCorr"
    releases = upstream.NEWEST
    forward_class = ConvolvedForward
    has_parts = ("conv_kernel_size",)

    def __init__(
        self,
        forward: BlockForward,
        mask: int,
        *,
        lattice: Any,
        table: StateTable,
        ledger: Ledger,
        num_particles: int,
        **more: Any,
    ) -> None:
        super().__init__(forward, mask, **more)
        self._lattice = lattice
        self._table = table
        self._ledger = ledger
        self._num_particles = num_particles
        # Of the running round, with c candidates of a row.
        self._before: torch.Tensor  # [G, N, H] states before the blocks
        self._candidates: torch.Tensor  # [K, G, N, c] int64
        self._unary: torch.Tensor  # [K, G, N, c] their log-probabilities, whatever stands before
        self._starts: torch.Tensor  # [G, N, c] logits of the first row's
        self._pairs: torch.Tensor  # [G, N, K - 1, c, c] logits of a row's, by the candidate before

    @classmethod
    def first_row(cls, config: ModelConfig) -> int:
        """Return the row that drafts the first token; the lattice has none of the last token."""
        return 1

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield settings of the lattice that are missing; see `BlockHead.problems`."""
        given = config.hf_config.to_dict().get("dflash_config") or {}
        names = (LATTICE + name for name in _SETTINGS)
        if missing := [name for name in names if given.get(name) is None]:
            yield f"has no {', '.join(missing)} in dflash_config"
        yield from super().problems(config, target, num_steps)

    @classmethod
    def _parts(cls, context: DraftContext) -> dict[str, Any]:
        runner = context.runner
        model: Any = runner.model
        sizes = {"num_columns": context.num_columns, "width": runner.model_config.hidden_size}
        return {
            "lattice": model.lilicorr,
            "table": StateTable.of(context.ledger, dtype=runner.dtype, **sizes),
            "ledger": context.ledger,
            "num_particles": context.num_particles,
        }

    @property
    def state_bytes(self) -> int:
        return self._table.num_bytes

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Find the states before the blocks, and run these; see `BlockHead.first_logits`."""
        self._before = self._table.before(at.positions[1], at.locations.particle_rows)
        return super().first_logits(last_two, at)

    def _begin(self) -> None:
        likeliest = self._steps.topk(self._lattice.candidate_topk)
        self._candidates = likeliest.indices
        whole = self._steps.float().logsumexp(3, keepdim=True)  # [K, G, N, 1]
        self._unary = likeliest.values.float() - whole
        starts, pairs = lattice_scores(
            self._lattice,
            _by_block(self._forward.embed(self._candidates)),
            _by_block(self._unary),
            _by_block(self._states),
            self._before.flatten(0, 1),
        )
        shape = self._before.shape[:2]
        self._starts = starts.unflatten(0, shape)
        self._pairs = pairs.unflatten(0, shape)

    def _logits_after(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        candidates = self._candidates[step]
        scores = self._starts
        if step:
            is_before = self._candidates[step - 1] == tokens.unsqueeze(2)  # [G, N, c]
            place = is_before.long().argmax(2)[..., None, None]  # [G, N, 1, 1]
            pairs = self._pairs[:, :, step - 1]
            scores = pairs.take_along_dim(place, 2).squeeze(2)
            # A token that the lattice does not have comes from elsewhere than q.
            scores = scores.where(is_before.any(2, keepdim=True), self._unary[step])
        return among(candidates, scores, self._steps[step])

    def _keep_chains(self, chains: Chains, states: torch.Tensor) -> None:
        shown = states.unflatten(0, chains.tokens.shape)  # [G, N, C, H]
        self._table.keep(chains.slots, chains.locations.particle_rows, shown)

    def _keep_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor
    ) -> None:
        assert batch.extend_lens is not None
        last = on_device(states.device, batch.extend_lens).cumsum(0) - 1  # [G]
        self._table.keep_prompts(
            target.out_cache_loc[last].long(),
            target.seq_lens.long(),
            self._ledger.particle_rows(batch.req_pool_indices, self._num_particles),
            states[last],
        )


def lattice_scores(
    lattice: Any,
    embedded: torch.Tensor,
    log_probs: torch.Tensor,
    outputs: torch.Tensor,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of candidates, by the candidate before them.

    As `LiLiCorrHead.score` of SGLang's models/lilicorr.py, from the weights themselves: what it
    makes of them as it loads would not follow new weights into captured rounds.

    Args:
        lattice: SGLang's `LiLiCorrHead`.
        embedded: ``[B, K, c, H]`` candidates as the target embeds them, the likeliest first.
        log_probs: ``[B, K, c]`` float32.
        outputs: ``[B, K, H]`` of the block's rows.
        before: ``[B, H]`` the state before the block.

    Returns:
        Logits of the first row's candidates ``[B, c]``, and of each later row's ``[B, K - 1, c,
        c]``, those of the candidate before them in dimension 2; float32.
    """
    hidden = _entered(lattice, embedded, log_probs, outputs)  # [B, K * c, h]
    num_rows, count = log_probs.shape[1:]
    bias = _slot_bias(lattice, num_rows, count).to(hidden.dtype)
    for layer in lattice.layers:
        hidden = layer(hidden, bias)
    hidden = lattice.output_norm(hidden).unflatten(1, (num_rows, count))
    projected, _ = lattice.context_proj(before.to(hidden.dtype))
    text = lattice.anchor_norm(projected)  # [B, h]
    own = text[:, None, None]
    both = torch.cat([hidden, own.expand_as(hidden), hidden * own], 3)
    factors = silu(lattice.factor_input_proj(both))

    def unit(vectors: torch.Tensor) -> torch.Tensor:
        return normalize(vectors, dim=-1, eps=lattice.vector_eps).float()

    into = unit(lattice.in_head(factors))  # [B, K, c, d]
    out_of = unit(lattice.out_head(factors[:, :-1]))
    of_text = unit(lattice.anchor_out_head(text)[0])  # [B, d]
    starts = (into[:, 0] @ of_text.unsqueeze(2)).squeeze(2)
    pairs = out_of @ into[:, 1:].transpose(2, 3)
    return lattice.logit_scale * starts, lattice.logit_scale * pairs


def _entered(
    lattice: Any, embedded: torch.Tensor, log_probs: torch.Tensor, outputs: torch.Tensor
) -> torch.Tensor:
    """Return what a lattice's layers read ``[B, K * c, h]``, by arguments of `lattice_scores`."""
    num_rows, count = log_probs.shape[1:]
    dtype = lattice.slot_embedding.dtype
    tokens = embedded.to(dtype)
    if lattice.token_proj is not None:
        tokens = _linear(lattice.token_proj, tokens)
    rank = torch.arange(count, device=log_probs.device, dtype=log_probs.dtype)
    features = [
        log_probs,
        log_probs.exp(),
        log_probs - log_probs[:, :, :1],
        (rank / max(count - 1, 1)).expand_as(log_probs),
        (rank == 0).to(rank.dtype).expand_as(log_probs),
    ]
    shown = lattice.feature_norm(torch.stack(features, 3).to(dtype))
    hidden = tokens + _linear(lattice.pass_hidden_proj, outputs.to(dtype)).unsqueeze(2)
    hidden = hidden + lattice.feature_mlp(shown)
    hidden = hidden + lattice.slot_embedding[0, :, :num_rows] + lattice.rank_embedding[0]
    return hidden.flatten(1, 2)


def _slot_bias(lattice: Any, num_rows: int, count: int) -> torch.Tensor:
    """Return what is added to the scores of attention, ``[1, heads, K * c, K * c]``, by rows."""
    device = lattice.slot_embedding.device
    row = torch.arange(num_rows * count, device=device) // count
    apart = row.unsqueeze(1) - row
    bias = lattice.relative_slot_bias[:, apart + lattice.block_size - 1]
    same = (apart == 0) * lattice.same_slot_bias.view(-1, 1, 1)
    return (bias + same).unsqueeze(0)


def _linear(layer: Any, values: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer of SGLang's, of which quantized ones take rows alone."""
    found, _ = layer(values.flatten(0, -2))
    return found.unflatten(0, values.shape[:-1])


def _by_block(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[K, G, N, ...]`` with each particle's rows together, ``[G * N, K, ...]``."""
    return rows.flatten(1, 2).transpose(0, 1)
