"""Draft with block heads (DFlash, arXiv 2602.06036), run over particles on SGLang's model class.

One pass returns the distributions of all K draft tokens: the block is the last token and K masks,
which attend to the text before them and to each other, in both directions. So q is a product of
marginals, from which each particle samples its own chain. A DSpark block (DeepSpec, 2026) has a
Markov head beside it: what it adds to the block's logits depends on the token before, and q is a
chain. Its first row, that of the last token, may draft as well. For the text before the block, the
head's keys and values are computed from the target's hidden states, and written to the slots of
their tokens right after the target's pass.
"""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc import upstream
from sglang_smc.models.attention import Implementation, store
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.proposers.base import DraftProposer, DraftSlots, to_full_vocabulary


class BlockForward(ParticleForward):
    """A block head over particles, with the embedding of SGLang's ``target``.

    Args:
        lm_head: of the head itself; None: the target's.
    """

    _blocks = True

    def __init__(
        self,
        runner: ModelRunner,
        tails: torch.Tensor,
        attention: Implementation,
        max_columns: int,
        target: Any,
        lm_head: Any = None,
    ) -> None:
        super().__init__(runner, tails, attention, max_columns)
        self._model: Any = runner.model
        self._target, self._lm_head = target, lm_head
        self._embed = upstream.without_lora(target.get_input_embeddings())
        # Some models scale embeddings outside of the embedding table.
        self._scale = getattr(target, "get_dflash_noise_embedding_scale", lambda: 1.0)()
        if runner.device == "cpu":  # SGLang's fused form, for 16 bits, is a Triton kernel
            for layer in self._model.layers:
                layer.self_attn.use_table_qk_norm_rope = False

    def block_logits(self, blocks: Chains, first: int) -> torch.Tensor:
        """Return the logits ``[K, G, N, V]`` of blocks, from the row ``first`` on."""
        batch = self._batch(ForwardMode.TARGET_VERIFY, blocks)
        embedded = self._embed(batch.input_ids) * self._scale
        with self._attending(blocks):
            output = self._model.forward(
                batch.input_ids, batch.positions, batch, input_embeds=embedded
            )
        masked = output.hidden_states.unflatten(0, blocks.tokens.shape)[:, :, first:]
        steps = masked.permute(2, 0, 1, 3)  # [K, G, N, H]: each step contiguous
        return self._logits(steps.flatten(0, 2), batch).unflatten(0, steps.shape[:3])

    def _logits(self, states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Map the last layer's output ``[R, H]`` to logits ``[R, V]``, or of the draft's tokens."""
        target = self._target
        ids = batch.input_ids
        own = self._lm_head
        lm_head = upstream.without_lora(target.lm_head) if own is None else own
        logits = target.logits_processor(ids, states, lm_head, batch).next_token_logits
        return logits if own is None else logits[:, : own.org_vocab_size]  # rows are padded

    def write(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values computed from the target's hidden states.

        Args:
            states: ``[R, F]`` hidden states of the target.
            positions, slots: ``[R]`` positions of their tokens, and destination KV slots.
        """
        model = self._model
        pool = self.attn_backend.token_to_kv_pool
        context = model.project_target_hidden(states)
        positions = positions.clamp_max(self._last_position)
        for layer in model.layers:
            attention = layer.self_attn
            shown = model.prepare_context_hidden_for_kv(layer, context)
            keys, values = attention.kv_proj_only(shown)
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            heads = -1, attention.num_kv_heads, attention.head_dim
            store(pool, attention.attn, slots, keys.view(heads), values.view(heads))


class BlockHead(DraftProposer):
    """A draft by a block head with a mask token: one pass for the distributions of all K tokens.

    Args:
        first: row of a block that drafts its first token.
        markov: SGLang's Markov head of a DSpark block, if any.
        hot, vocab_size: as in `to_full_vocabulary`.
    """

    wants_states = True

    def __init__(
        self,
        forward: BlockForward,
        mask: int,
        *,
        first: int = 1,
        markov: Any = None,
        hot: torch.Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.attn_backend = forward.attn_backend
        self._forward = forward
        self._mask = mask
        self._first = first
        self._markov = markov
        self._hot = hot
        self._vocab_size = vocab_size
        self._steps: torch.Tensor  # [K, G, N, V] logits of the running round

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the one pass of a round; see `DraftProposer.first_logits`."""
        last = last_two[:, :, 1:]
        num_masks = len(at.slots) - 3 + self._first
        masks = torch.full_like(last, self._mask).expand(-1, -1, num_masks)
        blocks = at.chains(torch.cat([last, masks], dim=2), 1)
        self._steps = self._forward.block_logits(blocks, self._first)
        return self.next_logits(0, last_two[:, :, 1], at)

    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Return logits after a token, of which a Markov head alone knows; see `DraftProposer`."""
        logits = self._steps[step]
        if self._markov is not None:
            logits = logits + self._markov.project_bias(self._markov.get_prev_embeddings(tokens))
        if self._hot is None:
            return logits
        return to_full_vocabulary(logits, self._hot, self._vocab_size)

    def read_chains(self, chains: Chains, states: torch.Tensor) -> None:
        """Write keys and values of the target's states; see `StatesReader.read_chains`."""
        column = torch.arange(chains.tokens.shape[2], device=chains.tokens.device)
        positions = chains.starts.unsqueeze(2) + column
        self._forward.write(states.flatten(0, 2), positions.flatten(), chains.slots.flatten())

    def read_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor | None
    ) -> None:
        """Write keys and values, without a pass; see `DraftProposer.read_prompts`."""
        assert states is not None
        self._forward.write(states, target.positions, target.out_cache_loc)
