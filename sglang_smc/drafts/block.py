"""Block heads (DFlash, arXiv 2602.06036), run over particles as SGLang's class has them.

One pass tells the laws of all K tokens: the block is the last token and K masks, which see the text
before them and each other, those behind too. So q is a product of marginals, from which each
particle draws a chain of its own. Of the text the head sees keys that are made of the target's
states, written to the slot of their token right behind the target's pass: what travels with a
particle are slots, as ever.
"""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_smc.drafts.proposal import DraftSlots
from sglang_smc.models.attention import Implementation, KVLocations, store
from sglang_smc.models.forward import ParticleForward

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.recording.passes import PassRecording


class BlockForward(ParticleForward):
    """A block head over particles.

    Args:
        runner, tails, attention, max_columns: as for `ParticleForward`.
        target: SGLang's model, whose embedding and LM head it is.
    """

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        attention: Implementation,
        max_columns: int,
        target: Any,
    ) -> None:
        super().__init__(runner, tails, attention, max_columns, blocks=True)
        self._model: Any = runner.model
        self._target = target
        self._embed = target.get_input_embeddings()
        # Of models that scale embeddings outside of their table.
        scales = hasattr(target, "get_dflash_noise_embedding_scale")
        self._scale = target.get_dflash_noise_embedding_scale() if scales else 1.0

    def laws(
        self,
        blocks: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """Logits ``[K, G, N, V]`` of what stands where blocks ``[G, N, K + 1]`` have masks.

        Other arguments as for `ParticleForward.next_logits`.
        """
        batch = self._batch(ForwardMode.TARGET_VERIFY, blocks, starts, slots, locations)
        embedded = self._embed(batch.input_ids) * self._scale
        with self._attending(locations, starts, blocks.shape[2]):
            output = self._model.forward(
                batch.input_ids, batch.positions, batch, input_embeds=embedded
            )
        masked = output.hidden_states.unflatten(0, blocks.shape)[:, :, 1:]
        steps = masked.permute(2, 0, 1, 3)  # [K, G, N, H]: each step's in one piece
        return self._logits(steps.flatten(0, 2), batch).unflatten(0, steps.shape[:3])

    def _logits(self, states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The target's own way from its last layer's output ``[R, H]`` to logits ``[R, V]``."""
        target = self._target
        ids = batch.input_ids
        return target.logits_processor(ids, states, target.lm_head, batch).next_token_logits

    def write(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Make keys and values of the target's states.

        Args:
            states: ``[R, F]``.
            positions, slots: ``[R]`` of their tokens, and where keys and values go.
        """
        model, pool = self._model, self.attn_backend.token_to_kv_pool
        context = model.project_target_hidden(states)
        positions = positions.clamp_max(self._last_position)
        for layer in model.layers:
            attention = layer.self_attn
            shown = model.prepare_context_hidden_for_kv(layer, context)
            keys, values = attention.kv_proj_only(shown)
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            heads = -1, attention.num_kv_heads, attention.head_dim
            store(pool, attention.attn, slots, keys.view(heads), values.view(heads))


class BlockHead:
    """Drafts by a block head: the laws of all K tokens come from one pass.

    Args:
        forward: the head over particles.
        mask: the token that stands where one is to be drafted.
    """

    at_once = True
    has_stock_passes = False  # they have no states to read
    state_bytes = 0

    def __init__(self, forward: BlockForward, mask: int) -> None:
        self._forward = forward
        self._mask = mask
        self._laws: torch.Tensor  # [K, G, N, V] of the running round

    @property
    def attn_backend(self) -> Any:
        """The head's, over particles."""
        return self._forward.attn_backend

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`; without drafts there is nothing to do."""
        last, slots = last_two[:, :, 1:], at.slots[1:].permute(1, 2, 0)  # [G, N, K + 1]
        num_steps = slots.shape[2] - 1
        if num_steps == 0:
            return last.float()
        masks = torch.full_like(slots[:, :, 1:], self._mask)
        blocks = torch.cat([last, masks], dim=2)
        self._laws = self._forward.laws(blocks, at.positions[1], slots, at.locations)
        return self._laws[0]

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`: whatever was drawn before."""
        return self._laws[step]

    def recorded(self, recording: "PassRecording") -> "BlockHead":
        """The same: its one pass leaves the laws of all steps behind."""
        return self

    def read_chains(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
        states: torch.Tensor,
    ) -> None:
        """See `ReadsStates`."""
        column = torch.arange(tokens.shape[2], device=tokens.device)
        positions = starts.unsqueeze(2) + column
        self._forward.write(states.flatten(0, 2), positions.flatten(), slots.flatten())
