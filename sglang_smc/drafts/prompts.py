"""Prompts, read by who drafts: beside the target, or from its states behind its own pass."""

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

from sglang_smc.drafts.block import BlockForward
from sglang_smc.drafts.eagle import Given, places_of_pairs
from sglang_smc.drafts.states import ReadTarget, StateTable
from sglang_smc.memory.ledger import Ledger
from sglang_smc.models.attention import KVLocations, store
from sglang_smc.models.softmax import gather_slots, softmax_of
from sglang_smc.models.supported import check_layer, head_group
from sglang_smc.models.vocabulary import readable
from sglang_smc.state.transfer import on_device

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class ReadsPrompts(Protocol):
    """Who drafts, as prefill sees it."""

    @property
    def wants_states(self) -> bool:
        """Whether `read` takes the target's."""
        ...

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Read the new tokens of prompts, which the target has read.

        Args:
            batch: of the scheduler.
            target: what the target's pass was told of them, T new tokens in all.
            states: ``[T, F]`` of the target at these tokens; None where they are not wanted.

        Returns:
            Logits ``[G, V]`` behind the prompts; None of heads, which need the next token first.
        """
        ...


class ModelPrompts:
    """A language model reads prompts as SGLang has models read them.

    Args:
        runner: the draft's.
        last_read: the last id that it has an embedding for; None for all.
    """

    wants_states = False

    def __init__(self, runner: "ModelRunner", last_read: int | None = None) -> None:
        self._runner = runner
        self._last_read = last_read

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> torch.Tensor:
        """See `ReadsPrompts`."""
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
    """An EAGLE-3 head reads prompts: the pairs of each new token with the state before it.

    Of a prompt whose beginning stands in the cache, or was read in an earlier chunk, the target
    reads the last token of that again, for its state.

    Args:
        runner: the head's.
        target: the target over particles.
        table: of the states that rounds go on from.
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
        """See `ReadsPrompts`."""
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
            spec_info=Given(before),  # pyright: ignore[reportArgumentType] -- what heads ask of it
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
        """The state before each new token, ``[T, F]``; anything before a text's first."""
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
    """A block head reads prompts: their states become keys, without a pass.

    Args:
        forward: the head over particles.
    """

    wants_states = True

    def __init__(self, forward: BlockForward) -> None:
        self._forward = forward

    def read(
        self, batch: "ScheduleBatch", target: ForwardBatch, states: torch.Tensor | None
    ) -> None:
        """See `ReadsPrompts`."""
        assert states is not None
        self._forward.write(states, target.positions, target.out_cache_loc)


class PromptAttention(AttentionBackend):
    """Causal attention of a head over prompts that leaves their first token out.

    No backend of SGLang's does. Prompts come one after another, each in one call of torch's.

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
        self._spans: list[tuple[int, int]]  # of each prompt: what stands there, and new tokens

    def plan(self, batch: "ScheduleBatch") -> None:
        """Prepare all layers of a pass over a batch of prompts."""
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
        """Attend as `plan` said; ``[T, q_heads * head_dim]``, as `ParticleAttention` has them."""
        check_layer(layer, self._group, kwargs)
        store(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        query = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
        output, first = torch.zeros_like(query), 0
        for row, (known, new) in zip(self._rows.split(1), self._spans, strict=True):
            behind = slice(first + (known == 0), first + new)  # the text's first token
            first += new
            if behind.start < behind.stop:
                position = torch.arange(1, known + new, device=q.device)
                slots = self._table[row, position].long()
                output[behind] = self._attend(query[behind], slots, layer)
        return output.view(q.shape)

    def _attend(
        self, query: torch.Tensor, slots: torch.Tensor, layer: "RadixAttention"
    ) -> torch.Tensor:
        """The last of ``slots`` ``[L]`` are the queries' own, ``[Q, q_heads, head_dim]``."""
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
        """What stands in ``slots``, ``[q_heads, L, head_dim]``."""
        found = gather_slots(cache, slots, cache.new_empty(len(slots), *cache.shape[1:]))
        return found.to(dtype).repeat_interleave(self._group, dim=1).transpose(0, 1)


def _token_of(req: "Req", position: int) -> int:
    """The token at a position of a request's text."""
    prompt = req.origin_input_ids
    return prompt[position] if position < len(prompt) else req.output_ids[position - len(prompt)]
