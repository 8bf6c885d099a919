"""Attend over particles in draft steps and verification, as an SGLang attention backend.

Stock backends treat particles as unrelated rows and read the prompt's KV once for each. This one
reads it once per request, by a Triton kernel or in plain torch.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc.models.chains import Chains, MergedRows
from sglang_smc.models.softmax import (
    Softmax,
    plan_shared_prefix,
    shared_prefix_attention,
    softmax_of,
)
from sglang_smc.models.supported import (
    check_kernel_type,
    check_layer,
    check_pool,
    head_group,
    sees_block,
)
from sglang_smc.models.windows import KeyWindow, window_of
from sglang_smc.smc.ledger import AttentionContext
from sglang_smc.upstream import kv_layers

Attend = Callable[..., torch.Tensor]  # of query, keys, values (None: of latents) and `Softmax`

Implementation = Literal["torch", "triton"]


class KeysWritten(Exception):  # noqa: N818 -- no error
    """The keys of a pass are written, and the rest of it is not needed."""


class PoolAttention(AttentionBackend):
    """Softmax attention over the KV pool of a model; subclasses define `attended`.

    Raises ValueError for a KV cache that this package's attention does not support.
    """

    needs_cpu_seq_lens = False
    blocks = False
    """Whether layers may let all new tokens of a sequence attend to each other."""

    ends_at: int | None = None
    """The layer at whose keys the running pass ends, by `KeysWritten`; None for a whole pass."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        check_pool(runner)
        assert runner.req_to_token_pool is not None, "pools are built before backends"
        # The pool, not its tensor: a worker may put a taller table into it later.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.dtype = runner.dtype
        self.group = head_group(runner)
        self.is_scaled = self.token_to_kv_pool.dtype.itemsize == 1
        # Of latents (MLA): width of the value in a key.
        self.rank = runner.model_config.kv_lora_rank if runner.use_mla_backend else None

    @abstractmethod
    def attended(self, q: torch.Tensor, layer: RadixAttention, softmax: Softmax) -> torch.Tensor:
        """Attend with queries; arguments and result as in `forward_extend`."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write keys and values, then attend with the plan of the running forward.

        Args:
            q: ``[R, q_heads * head_dim]`` or ``[R, q_heads, head_dim]``, of the rows that the model
                runs.
            k, v: ``[R, kv_heads, head_dim]``, written to ``out_cache_loc`` first; None where the
                layer reads another layer's cache.
            sinks: ``[q_heads]`` scores of a key without a value, for models that have them.

        Returns:
            The output of the rows, each of q_heads * width of a value.
        """
        unsupported = kwargs if self.rank is None else {**kwargs, "sinks": sinks}
        check_layer(layer, self.group, unsupported, self.rank, blocks=self.blocks)
        if save_kv_cache and k is not None and v is not None:
            self.write(layer, forward_batch.out_cache_loc, k, v)
            if layer.layer_id == self.ends_at:
                raise KeysWritten
        return self.attended(q, layer, softmax_of(layer, sinks, self.is_scaled))

    def write(
        self, layer: RadixAttention, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        store(self.token_to_kv_pool, layer, slots, k, v)

    # Decode is an extend by one token.
    forward_decode = forward_extend

    def caches(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a layer's keys and values, ``[slots, kv_heads, head_dim]``; latents are both."""
        pool = self.token_to_kv_pool
        if self.rank is not None:
            return pool.get_key_buffer(layer_id), None
        return pool.get_kv_buffer(layer_id)


class ParticleAttention(PoolAttention):
    """Attention of particles over their shared prefix and their tails.

    It is causal, except for the layers of a block head.

    Args:
        runner: the target's or the draft's, its pools built.
        tails: the particles' rows, `Ledger.tails`.
        implementation: "triton" never waits for the device, so that a CUDA graph can capture it;
            "torch" runs anywhere and reads lengths on the host.
        first_key: the first position of a sequence that has a key; those before it are not
            attended.
        blocks: whether layers may let all new tokens of a particle attend to each other
            (`AttentionType.ENCODER_ONLY`), as those of block heads do.

    Raises ValueError for a model or a KV cache that this attention does not support.
    """

    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """Positions and table by which the next layer's queries and keys are yet to be rotated."""

    rotates_pass = False
    """Whether layers of the running pass leave rotations to this attention."""

    def __init__(
        self,
        runner: ModelRunner,
        tails: torch.Tensor,
        implementation: Implementation,
        *,
        first_key: int = 0,
        blocks: bool = False,
    ) -> None:
        super().__init__(runner)
        self.tails = tails
        if implementation == "triton" and self.is_scaled:
            gpu = torch.cuda.get_device_capability(tails.device) if tails.is_cuda else None
            check_kernel_type(self.token_to_kv_pool.dtype, gpu)
        self._plan = {"torch": self._plan_torch, "triton": self._plan_triton}[implementation]
        # Whether the kernel applies RoPE and writes KV; in float32 registers would spill.
        plain = self.rank is None and not blocks and self.dtype.itemsize == 2
        plain = plain and self.token_to_kv_pool.dtype == self.dtype
        self.rotates = implementation == "triton" and plain
        self._max_prefix = runner.model_config.context_len
        self._first_key = first_key
        self.blocks = blocks
        if self.rank is not None:
            self._set_up_latents(runner, implementation)
        self._shape: tuple[int, ...]  # [G, N, C] of the running forward
        self._merged: MergedRows | None = None
        self._new: dict[str, Any] = {}  # keys of the running layer that are yet to be written
        if implementation == "triton" and self.rank is None:
            from sglang_smc.kernels.attention.particle_attention import new_arrivals

            pool = self.token_to_kv_pool
            rows = len(self.req_to_token_pool.req_to_token)
            _, kv_heads, self._head_dim = pool.get_key_buffer(kv_layers(pool)[0]).shape
            self._arrivals = new_arrivals(rows, kv_heads, tails.device)
        # Arguments: the window, and whether tokens of a block attend to each other.
        self._attend_over: Callable[[KeyWindow | None, bool], Attend]

    def _set_up_latents(self, runner: ModelRunner, implementation: Implementation) -> None:
        if self.blocks:
            raise ValueError(
                "block heads with latent attention (MLA) are not supported: pass a head with "
                "ordinary attention, or a draft model"
            )
        from sglang_smc.models.latent_attention import NAME, absorb

        absorb(NAME)
        # SGLang's layers read these names before the server's.
        self.prefill_attention_backend_str = self.decode_attention_backend_str = NAME
        if implementation == "triton":
            from sglang_smc.kernels.attention.latent import check_sizes

            config = runner.model_config
            check_sizes(runner.dtype, config.kv_lora_rank, config.qk_rope_head_dim)

    def plan(self, chains: Chains, merged: MergedRows | None = None) -> None:
        """Plan all layers of a forward over chains.

        Args:
            merged: the rows that the model runs; None for all.
        """
        self._shape = chains.slots.shape
        self._merged = merged
        self.rotates_pass = self.rotates and self.ends_at is None and self._can_rotate()

        def attend_over(window: KeyWindow | None, sees_block: bool) -> Attend:
            return self._plan(
                AttentionContext(
                    req_to_token=self.req_to_token_pool.req_to_token,
                    tails=self.tails,
                    locations=chains.locations,
                    starts=chains.starts,
                    window=None if window is None else window.before,
                    sees_block=sees_block,
                    first_key=self._first_key,
                    sink=0 if window is None else window.sink,
                )
            )

        self._attend_over = cache(attend_over)  # layers of one kind share their plan

    def _can_rotate(self) -> bool:
        from sglang_smc.kernels.attention import work

        chip = work.chip_of(self.tails.device)
        return work.can_rotate(self._shape[2] * self.group, self._head_dim, chip)

    def write(
        self, layer: RadixAttention, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values, or leave them to `attended` if they are not rotated."""
        if self.rotation is None:
            super().write(layer, slots, k, v)
            return
        from sglang_smc.kernels.attention.particle_attention import New

        positions, table = self.rotation
        self._new = {"new": New.of(k, v, slots, positions, table)}
        self.rotation = None

    def attended(self, q: torch.Tensor, layer: RadixAttention, softmax: Softmax) -> torch.Tensor:
        """Attend with the plan of `plan`; of all G * N * C rows, or of the merged ones."""
        assert self.rotation is None, "a layer that leaves its rotation writes keys, too"
        attend = self._attend_over(window_of(layer), sees_block(layer))
        keys, values = self.caches(layer.layer_id)
        new = self._new
        self._new = {}
        output = attend(self._queries(q, layer), keys, values, softmax=softmax, **new)
        return self._outputs(output)[..., : self.rank].reshape(len(q), -1)

    def _queries(self, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        """Return the queries of all rows, ``[G, N, C, q_heads, head_dim]``."""
        q = q if self._merged is None else q[self._merged.results]
        return q.view((*self._shape, layer.tp_q_head_num, -1))

    def _outputs(self, output: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the rows that the model runs, of ``[G, N, C, ...]``."""
        if self._merged is None:
            return output
        return output.flatten(0, 2)[self._merged.kept]

    def _plan_torch(self, context: AttentionContext) -> "Attend":
        pool = self.token_to_kv_pool
        plan = plan_shared_prefix(
            context,
            num_columns=self._shape[2],
            group=self.group,
            dtype=self.dtype,
            cache=pool.get_key_buffer(kv_layers(pool)[0]),
            merged=self._merged,
        )
        return partial(shared_prefix_attention, plan=plan)

    def _plan_triton(self, context: AttentionContext) -> "Attend":
        longest = self._max_prefix
        rank = self.rank
        if rank is not None:
            from sglang_smc.kernels.attention.latent import latent_attention

            return lambda query, latents, _, softmax: latent_attention(
                query, latents, context, rank=rank, max_prefix=longest, scaling=softmax.scaling
            )
        from sglang_smc.kernels.attention.particle_attention import particle_attention

        fixed: dict[str, Any] = {"max_prefix": longest, "arrivals": self._arrivals}
        return lambda query, keys, values, softmax, **new: particle_attention(
            query, keys, values, context, **softmax._asdict(), **new, **fixed
        )


def store(
    pool: Any, layer: RadixAttention, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write keys and values ``[R, kv_heads, head_dim]`` of a layer to ``slots`` ``[R]``.

    8-bit keys and values are divided by the layer's scales.
    """
    scales = (layer.k_scale, layer.v_scale) if pool.dtype.itemsize == 1 else ()
    pool.set_kv_buffer(layer, slots, k, v, *scales)


def slots_before(
    tails: torch.Tensor, particle_rows: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Return the slots of the tokens before ``starts``, int64, from the particles' own rows.

    ``particle_rows`` and the result have the shape of ``starts``.
    """
    return tails[particle_rows, (starts - 1) & (tails.shape[1] - 1)].long()


def seed_tail(
    tails: torch.Tensor, particle_rows: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the slot of a prompt's last token into the particles' rows, for `slots_before`.

    Args:
        tails: `Ledger.tails`.
        particle_rows: ``[G, N]`` rows of ``tails``.
        lengths, slots: ``[G]`` of the prompts, and of their last tokens.
    """
    place = (lengths - 1) & (tails.shape[1] - 1)
    tails[particle_rows, place.unsqueeze(1)] = slots.unsqueeze(1).int()
