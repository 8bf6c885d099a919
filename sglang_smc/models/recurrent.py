"""Run linear-attention layers over particles, each of which has its own recurrent state.

A particle's state is addressed by the KV slot of the last token that the target has processed of
it. The ledger passes that slot on when particles are resampled, so that no state is copied then:
the next pass finds the particle that wrote the slot, takes its state and columns, and advances the
state over the columns that were kept. docs/algorithm.md has the design, and its memory.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc.models.attention import Implementation, ParticleAttention, seed_tail, slots_before
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.gated_delta import columns_of, gated_delta


class StateTables(NamedTuple):
    """The recurrent states of P particles on the device, those of a request together.

    A state includes the kept columns of all passes but the last. Of the last pass its C columns are
    stored as inputs, with the W - 1 before them, which the convolution reads.
    """

    states: torch.Tensor  # [L, P, v_heads, V, K]
    inputs: torch.Tensor  # [L, P, W - 1 + C, D] before the convolution
    gates: torch.Tensor  # [L, P, C, 2 * v_heads] a, then b
    readers: torch.Tensor  # [KV slots] int64: (C + 1) * particle + columns of it, this included

    @classmethod
    def of(
        cls, pool: Any, *, num_particles: int, num_columns: int, num_slots: int, dtype: torch.dtype
    ) -> "StateTables":
        """Return tables of zeros for N particles of each row of SGLang's `HybridReqToTokenPool`.

        ``num_slots`` counts the padding slot 0; ``dtype`` is that of the layers' inputs.
        """
        states = take_room(pool, len(pool.req_to_token) * num_particles)
        windows = pool.mamba_pool.mamba_cache.conv[0]  # [L, slots, D, W - 1]
        shape = states.shape[:2]
        _, _, num_inputs, width = windows.shape
        return cls(
            states,
            windows.new_zeros(*shape, width + num_columns, num_inputs, dtype=dtype),
            windows.new_zeros(*shape, num_columns, 2 * states.shape[2], dtype=dtype),
            torch.zeros(num_slots, dtype=torch.int64, device=states.device),
        )


def take_room(pool: Any, num_states: int) -> torch.Tensor:
    """Return memory for states ``[L, num_states, v_heads, V, K]``.

    SGLang allocates K + 1 states per request for its own speculation. That buffer is reused where
    it is large enough, and replaced by a new table otherwise.
    """
    cache = pool.mamba_pool.mamba_cache
    found = cache.intermediate_ssm.flatten(1, 2)
    of_requests = cache.temporal
    pool.mamba_pool.mamba_cache = dataclasses.replace(cache, intermediate_ssm=None)
    del cache
    if num_states <= found.shape[1]:
        return found[:, :num_states]
    layers = len(found)
    _, *shape = found.shape[1:]
    del found
    return of_requests.new_zeros(layers, num_states, *shape)


class RecurrentParticles(AttentionBackend):
    """Attention of particles for models in which some layers use linear attention, others full."""

    needs_cpu_seq_lens = False

    def __init__(
        self, full: ParticleAttention, tables: StateTables, implementation: Implementation
    ) -> None:
        super().__init__()
        self.token_to_kv_pool = full.token_to_kv_pool
        self.req_to_token_pool: Any = full.req_to_token_pool
        self.tables = tables
        self._full = full
        self._tails = full.tails
        self._most_columns = tables.gates.shape[2]
        self._gated_delta: Any = gated_delta
        if implementation == "triton":
            from sglang_smc.kernels.attention import gated_delta as kernel

            self._gated_delta = kernel.gated_delta
        # Of the running pass, [P] int64:
        self._own: torch.Tensor  # its particles
        self._source: torch.Tensor  # the particle from which each takes state and columns
        self._num_past: torch.Tensor  # kept columns of that particle

    def plan(self, chains: Chains, merged: None = None) -> None:
        self._full.plan(chains, merged)

    def begin_forward(self, chains: Chains) -> None:
        """Find the states from which a pass continues, and note which particle writes each slot."""
        readers = self.tables.readers
        base = self._most_columns + 1
        slots = chains.slots
        particle_rows = chains.locations.particle_rows
        found = readers[slots_before(self._tails, particle_rows, chains.starts)].flatten()
        self._source = found // base
        self._num_past = found % base
        self._own = particle_rows.flatten()
        column = torch.arange(1, slots.shape[2] + 1, device=slots.device)
        readers[slots] = particle_rows.unsqueeze(2) * base + column

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the attention of a layer of either kind."""
        if "mixed_qkv" in kwargs:
            return self.forward_linear(**kwargs)
        return self._full.forward(*args, **kwargs)

    def forward_linear(
        self,
        *,
        layer: RadixLinearAttention,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Advance states over the kept columns of the last pass, then run this pass's columns.

        Args:
            mixed_qkv: ``[P * C, D]`` before the convolution.
            a, b: ``[P * C, v_heads]``.

        Returns:
            ``[1, P * C, v_heads, V]``.
        """
        here = self.req_to_token_pool.mamba_map[layer.layer_id]
        states = self.tables.states[here]
        inputs = self.tables.inputs[here]
        gates = self.tables.gates[here]
        own = self._own
        num_past = self._num_past
        heads = layer.num_v_heads
        past_inputs = inputs[self._source]
        past_gates = gates[self._source]
        past = columns_of(past_inputs, layer, *past_gates.split(heads, dim=2))

        width = inputs.shape[1] - self._most_columns  # W - 1
        last = num_past.unsqueeze(1) + torch.arange(width, device=own.device)
        window = past_inputs.gather(1, last.unsqueeze(2).expand(-1, -1, inputs.shape[2]))
        new_inputs = torch.cat([window, mixed_qkv.view(len(own), -1, inputs.shape[2])], dim=1)
        new_gates = torch.cat([a, b], dim=1).view(len(own), -1, 2 * heads)
        new = columns_of(new_inputs, layer, *new_gates.split(heads, dim=2))

        output, rolled = self._gated_delta(states, self._source, past, num_past, new)
        states[own] = rolled
        inputs[own, : new_inputs.shape[1]] = new_inputs
        gates[own, : new_gates.shape[1]] = new_gates
        return output.view(1, -1, *output.shape[2:])

    def init_from_prompt(
        self, rows: torch.Tensor, lengths: torch.Tensor, particles: torch.Tensor
    ) -> None:
        """Start particles from the states after prompts, which are in SGLang's pool.

        Args:
            rows, lengths: ``[G]`` int64 rows of `req_to_token`, and numbers of tokens processed.
            particles: ``[G, N]`` int64 rows of all particles.
        """
        pool = self.req_to_token_pool
        tables = self.tables
        first = particles[:, 0]
        slots = pool.req_to_token[rows, lengths - 1]  # [G]
        seed_tail(self._tails, particles, lengths, slots)
        tables.readers[slots.long()] = first * (self._most_columns + 1)
        cache = pool.mamba_pool.mamba_cache
        found = pool.get_mamba_indices(rows).long()
        tables.states[:, first] = cache.temporal[:, found]
        windows = cache.conv[0][:, found].transpose(2, 3)  # [L, G, W - 1, D]
        tables.inputs[:, first, : windows.shape[2]] = windows.to(tables.inputs.dtype)


class RecurrentForward(ParticleForward):
    """A `ParticleForward` of a target with linear attention; ``ledger`` a `smc.ledger.Ledger`."""

    def __init__(
        self,
        runner: ModelRunner,
        ledger: Any,
        attention: Implementation,
        *,
        num_particles: int,
        max_columns: int,
    ) -> None:
        super().__init__(runner, ledger.tails, attention, max_columns)
        self.merges = False  # each particle has a state of its own
        tables = StateTables.of(
            runner.req_to_token_pool,
            num_particles=num_particles,
            num_columns=max_columns,
            num_slots=len(ledger.rank),
            dtype=runner.dtype,
        )
        self._ledger = ledger
        self._num_particles = num_particles
        self._linear = RecurrentParticles(self.attn_backend, tables, attention)
        self.attn_backend: Any = self._linear

    def init_from_prompt(self, batch: Any) -> None:
        super().init_from_prompt(batch)
        rows = batch.req_pool_indices
        particles = self._ledger.particle_rows(rows, self._num_particles)
        self._linear.init_from_prompt(rows, batch.seq_lens.long(), particles)

    def _run(self, mode: ForwardMode, chains: Chains) -> Any:
        self._linear.begin_forward(chains)
        return super()._run(mode, chains)
