"""Attend over latents (MLA) of particles that share a prefix, in plain torch.

A layer caches one latent per token, and each query head has absorbed its part of the projections
(DeepSeek-V2, arXiv 2405.04434, section 2.1): scores are dot products with the whole latent, values
are its first numbers. So all heads read the same keys, and those of the shared prefix are gathered
once per request for all its particles, columns and heads.

SGLang's DeepSeek layers choose, by the name of the attention backend, between two forms that are
equal in exact arithmetic: absorbed, over latents, and with keys and values of each head
decompressed from the latents. Particles use the absorbed form in all forwards, since it alone reads
the cache as it is stored.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sglang_smc.models.attention import Implementation, ParticleAttention
from sglang_smc.models.softmax import (
    Attended,
    SharedPrefixPlan,
    Softmax,
    attend,
    gather_slots,
    join,
)
from sglang_smc.models.supported import check_layer

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.models.attention import Attend


def latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    plan: SharedPrefixPlan,
    rank: int,
    scaling: float,
) -> torch.Tensor:
    """Compute causal softmax attention of particles over the latents of prefix and tails.

    Args:
        query: ``[G, N, C, heads, rank + rope]``.
        latents: ``[slots, 1, rank + rope]``, the cache of one layer.
        plan: for queries of ``heads`` to one key head, see `plan_shared_prefix`.
        rank: width of the value in a latent.
        scaling: factor of the scores, before the softmax.

    Returns:
        ``[G, N, C, heads, rank]``, contiguous.
    """
    size, num_particles, _, _, width = query.shape
    num_prefix, softmax = plan.prefix_mask.numel(), Softmax(scaling)
    gathered = gather_slots(latents, plan.slots, plan.key_scratch).to(query.dtype)
    prefix = _attend(
        query.reshape(size, 1, -1, width),  # [G, 1, N * C * heads, width]
        gathered[:num_prefix],
        plan.prefix_mask,
        softmax,
    )
    tails = _attend(
        query.reshape(size * num_particles, 1, -1, width),  # [G * N, 1, C * heads, width]
        gathered[num_prefix:],
        plan.tail_mask,
        softmax,
    )
    joined = join(_cut(prefix, rank), _cut(tails, rank), softmax)  # [G * N * C * heads, rank]
    return joined.view(*query.shape[:-1], rank)


def _attend(
    query: torch.Tensor, gathered: torch.Tensor, mask: torch.Tensor, softmax: Softmax
) -> Attended:
    """Attend to ``[rows * L, 1, width]`` latents of ``rows`` rows of queries.

    The values are whole latents, since torch has a kernel for values as wide as keys.
    """
    latents = gathered.view(len(query), 1, -1, gathered.shape[2])
    return attend(query, latents, latents, mask, softmax)


def _cut(attended: Attended, rank: int) -> Attended:
    """Reshape attention ``[B, 1, Q, ...]`` to ``[B * Q, ...]`` and cut values to ``rank``."""
    return Attended(attended.output[..., :rank].reshape(-1, rank), attended.log_sum.flatten())


NAME = "smc_latent"


def absorb(backend_name: str) -> None:
    """Make SGLang's layers use the absorbed form, in all modes, for a backend of this name."""
    AttentionBackendRegistry.register(backend_name, lambda *_: AttnForwardMethod.MLA)


class LatentParticleAttention(ParticleAttention):
    """`ParticleAttention` over latents, with the same arguments, errors and use.

    Heads that draft are not supported: it raises for ``first_key`` and ``blocks``.
    """

    # SGLang's layers read these names before the server's.
    prefill_attention_backend_str = decode_attention_backend_str = NAME

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        implementation: Implementation,
        *,
        first_key: int = 0,
        blocks: bool = False,
    ) -> None:
        if first_key or blocks:
            raise ValueError(
                "heads with latent attention (MLA) are not supported "
                f"(first_key={first_key}, blocks={blocks}): pass a head with ordinary attention, "
                "or a draft model"
            )
        super().__init__(runner, tails, implementation)
        absorb(NAME)
        self._rank = runner.model_config.kv_lora_rank
        if implementation == "triton":
            from sglang_smc.kernels.attention.latent import check_sizes

            check_sizes(runner.dtype, self._rank, runner.model_config.qk_rope_head_dim)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend with the plan of `plan`.

        Args:
            q: ``[R, heads, rank + rope]``, or flat, of all G * N * C rows or of the merged ones.
            k: ``[R, 1, rank + rope]``, the new latents, written to ``out_cache_loc`` first.
            v: the first part of ``k``.

        Returns:
            ``[R, heads * rank]``.
        """
        check_layer(layer, self._group, kwargs, rank=self._rank)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        latents = pool.get_key_buffer(layer.layer_id)
        attend = self._attend_over(None, False)
        output = attend(self._queries(q, layer), latents, rank=self._rank, scaling=layer.scaling)
        return self._outputs(output).reshape(-1, layer.tp_q_head_num * self._rank)

    forward_decode = forward_extend

    def _in_torch(self, plan: SharedPrefixPlan) -> "Attend":
        return partial(latent_attention, plan=plan)

    def _in_triton(self, places: dict[str, Any], window: int | None, block: bool) -> "Attend":
        from sglang_smc.kernels.attention.latent import latent_attention

        assert window is None and not block, "checked with the layers"
        return partial(latent_attention, **places)
