"""Prefill the draft: run a draft model over prompts, or a head over the target's hidden states."""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch.nn.attention.bias import causal_lower_right

from sglang_smc.kv.ledger import Ledger
from sglang_smc.kv.transfer import on_device
from sglang_smc.models.attention import KVLocations, store
from sglang_smc.models.softmax import gather_slots, softmax_of
from sglang_smc.models.supported import check_layer, head_group
from sglang_smc.models.vocabulary import readable
from sglang_smc.proposers.dflash import BlockForward
from sglang_smc.proposers.eagle3 import Given, places_of_pairs
from sglang_smc.proposers.hidden_states import ReadTarget, StateTable

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class ReadsPrompts(Protocol):
    """A draft, as prefill calls it."""

    @property
    def wants_states(self) -> bool:
        """Return whether `read` takes the target's hidden states."""
        ...

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run over the new tokens of prompts, after the target's pass.

        Args:
            batch: of the scheduler.
            target: the batch of the target's pass, T new tokens in all.
            states: ``[T, F]`` hidden states of the target at these tokens; None where not wanted.

        Returns:
            Logits ``[G, V]`` after the prompts; None for heads, which need the next token first.
        """
        ...


class ModelPrompts:
    """Prefill of a draft model, by SGLang's own forward.

    Args:
        runner: the draft's.
        last_read: the last token id that has an embedding; None for all.
    """

    wants_states = False

    def __init__(self, runner: "ModelRunner", last_read: int | None = None) -> None:
        self._runner = runner
        self._last_read = last_read

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> torch.Tensor:
        """Run over new tokens of prompts; see `ReadsPrompts.read`."""
        forward_batch = ForwardBatch.init_new(
            batch, self._runner, return_hidden_states_before_norm=False
        )
        forward_batch.return_logprob = False
        forward_batch.input_ids = readable(forward_batch.input_ids, self._last_read)
        output = self._runner.forward(forward_batch).logits_output
        assert isinstance(output, LogitsProcessorOutput)
        assert output.next_token_logits is not None
        return output.next_token_logits


class EaglePrompts:
    """Prefill of an EAGLE-3 head, over pairs of each new token and the hidden state before it.

    Where the prefix of a prompt is cached, or was processed in an earlier chunk, the target runs
    its last token again to recover that hidden state.

    Args:
        runner: the head's.
        target: the target over particles.
        table: the hidden states from which rounds continue.
        ledger: of KV slots.
        num_particles: N of the server.
    """

    wants_states = True

    def __init__(
        self,
        runner: "ModelRunner",
        target: ReadTarget,
        table: StateTable,
        ledger: Ledger,
        num_particles: int,
    ) -> None:
        self._runner = runner
        self._model: Any = runner.model
        self._target = target
        self._table = table
        self._ledger = ledger
        self._num_particles = num_particles
        self._attention = PromptAttention(runner)

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> None:
        """Run over new tokens of prompts; see `ReadsPrompts.read`."""
        assert states is not None and batch.extend_lens is not None
        ends = on_device(states.device, batch.extend_lens).cumsum(0)  # [G]
        before = self._states_before(batch, states, ends)
        pairs = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(ends),
            input_ids=target.input_ids,
            req_pool_indices=target.req_pool_indices,
            seq_lens=target.seq_lens,
            out_cache_loc=target.out_cache_loc,
            seq_lens_sum=0,
            positions=places_of_pairs(target.positions),
            spec_info=Given(before),  # pyright: ignore[reportArgumentType] -- heads read `Given`
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        if self._runner.model_config.model_is_mrope:
            pairs.mrope_positions = pairs.positions.expand(3, -1)
        self._attention.plan(batch)
        with forward_context(ForwardContext(attn_backend=self._attention)), torch.no_grad():
            self._model.model(pairs.input_ids, pairs.positions, pairs)
        rows, last = batch.req_pool_indices, ends - 1
        self._table.keep_prompts(
            target.out_cache_loc[last].long(),
            target.seq_lens.long(),
            self._ledger.particle_rows(rows, self._num_particles),
            states[last],
        )

    def _states_before(
        self, batch: "ScheduleBatch", states: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden state before each new token, ``[T, F]``.

        It is arbitrary before the first token of a sequence.
        """
        before = states.roll(1, 0)
        known = batch.prefix_lens
        assert known is not None
        going_on = [i for i, length in enumerate(known) if length]
        if not going_on:
            return before
        device = states.device
        lengths = on_device(device, [known[i] for i in going_on])  # [R]
        tokens = on_device(device, [_token_of(batch.reqs[i], known[i] - 1) for i in going_on])
        which = on_device(device, going_on)
        rows = batch.req_pool_indices[which]
        locations = KVLocations(rows, lengths, self._ledger.particle_rows(rows, 1), max_tail=1)
        found = self._target.states_at(tokens, lengths - 1, locations)
        first = torch.nn.functional.pad(ends, (1, 0))[which]
        return before.index_copy(0, first, found)


class BlockPrompts:
    """Prefill of a block head: hidden states become keys and values, without a pass.

    Args:
        forward: the head over particles.
    """

    wants_states = True

    def __init__(self, forward: BlockForward) -> None:
        self._forward = forward

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> None:
        """Run over new tokens of prompts; see `ReadsPrompts.read`."""
        assert states is not None
        self._forward.write(states, target.positions, target.out_cache_loc)


class PromptAttention(AttentionBackend):
    """Causal attention of a head over prompts, without their first token.

    No backend of SGLang does that. Prompts are processed one by one, each in one call of torch's.

    Args:
        runner: the head's, its pools built.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__()
        assert runner.req_to_token_pool is not None, "pools are built before backends"
        self._table = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._group = head_group(runner)
        self._is_scaled = self.token_to_kv_pool.dtype.itemsize == 1
        self._rows: torch.Tensor  # [G]
        self._spans: list[tuple[int, int]]  # of each prompt: cached tokens, and new tokens

    def plan(self, batch: "ScheduleBatch") -> None:
        """Plan all layers of a pass over a batch of prompts."""
        assert batch.prefix_lens is not None and batch.extend_lens is not None
        self._rows = batch.req_pool_indices
        self._spans = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend over the batch given to `plan`; returns ``[T, q_heads * head_dim]``."""
        check_layer(layer, self._group, kwargs)
        store(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        query = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
        output, first = torch.zeros_like(query), 0
        for row, (known, new) in zip(self._rows.split(1), self._spans, strict=True):
            behind = slice(first + (known == 0), first + new)  # without the sequence's first token
            first += new
            if behind.start < behind.stop:
                position = torch.arange(1, known + new, device=q.device)
                slots = self._table[row, position].long()
                output[behind] = self._attend(query[behind], slots, layer)
        return output.view(q.shape)

    def _attend(
        self, query: torch.Tensor, slots: torch.Tensor, layer: "RadixAttention"
    ) -> torch.Tensor:
        """Attend with queries ``[Q, q_heads, head_dim]`` of the last of slots ``[L]``."""
        softmax = softmax_of(layer, None, self._is_scaled)
        stored = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        keys, values = (self._of_heads(cache, slots, query.dtype) for cache in stored)
        found = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=causal_lower_right(len(query), len(slots)),
            scale=softmax.scaling,
        )
        return found.squeeze(0).transpose(0, 1) * softmax.value_scale

    def _of_heads(
        self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return cached values of ``slots`` per query head: ``[q_heads, L, head_dim]``."""
        found = gather_slots(cache, slots, cache.new_empty(len(slots), *cache.shape[1:]))
        return found.to(dtype).repeat_interleave(self._group, dim=1).transpose(0, 1)


def _token_of(req: "Req", position: int) -> int:
    """Return the token at a position of a request's sequence."""
    prompt = req.origin_input_ids
    return prompt[position] if position < len(prompt) else req.output_ids[position - len(prompt)]
