"""Softmax attention over some of the keys, in plain torch: what a layer makes of its scores."""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class Softmax(NamedTuple):
    """How a layer goes from queries and keys to weights, and from values to its output."""

    scaling: float  # factor of the scores, with that of keys in 8 bits in it
    cap: float = 0.0  # scores become cap * tanh(score / cap), as in Gemma 2; 0: they stay
    sinks: torch.Tensor | None = None  # [q_heads] scores of a key without a value, as in gpt-oss
    value_scale: float = 1.0  # of values in 8 bits


def softmax_of(layer: "RadixAttention", sinks: torch.Tensor | None, is_scaled: bool) -> Softmax:
    """What ``layer`` asks for.

    Args:
        sinks: ``[q_heads]``, which some models hand to attention with each call.
        is_scaled: whether keys and values were divided by the layer's scales as they were stored,
            which is so for those of 8 bits.
    """
    if not is_scaled:
        return Softmax(layer.scaling, layer.logit_cap, sinks)
    of_keys, of_values = layer.k_scale_float, layer.v_scale_float
    return Softmax(
        layer.scaling * (1.0 if of_keys is None else of_keys),
        layer.logit_cap,
        sinks,
        1.0 if of_values is None else of_values,
    )


class Attended(NamedTuple):
    """Softmax attention over some of the keys."""

    output: torch.Tensor  # [..., head_dim]
    log_sum: torch.Tensor  # [...] float32, log-sum-exp of the scores


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax: Softmax,
) -> Attended:
    """Softmax attention that also tells how much there was to see; sinks are left to `finish`.

    Args:
        query: ``[B, H, Q, head_dim]``.
        keys, values: ``[B, H, L, head_dim]``.
        mask: added to the scores, broadcasts to ``[B, H, Q, L]``. A query that may see no key needs
            a finite one: it gets a mean of all values, with a log-sum-exp that gives it no weight.
            None: the i-th query sees the keys 0 to i.
    """
    if query.device.type == "cpu" and not softmax.cap:
        options = {"is_causal": mask is None, "attn_mask": mask, "scale": softmax.scaling}
        return Attended(*_flash_attention(query, keys, values, **options))
    if mask is None:
        mask = additive(hidden_ahead(query.shape[2], query.device), query.dtype)
    return attend_anywhere(query, keys, values, mask, softmax)


def attend_anywhere(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    softmax: Softmax,
) -> Attended:
    """`attend` written out, where torch has no kernel for it."""
    scores = (query @ keys.transpose(2, 3)).float() * softmax.scaling
    if softmax.cap:
        scores = softmax.cap * torch.tanh(scores / softmax.cap)
    scores = scores + mask
    log_sum = scores.logsumexp(3)
    weights = (scores - log_sum.unsqueeze(3)).exp()
    return Attended(weights.to(values.dtype) @ values, log_sum)


def join(one: Attended, other: Attended, softmax: Softmax) -> torch.Tensor:
    """The output of a layer, ``[..., head_dim]``, from two disjoint sets of keys that are all."""
    weight = torch.sigmoid(other.log_sum - one.log_sum).unsqueeze(-1)
    output = torch.lerp(one.output, other.output, weight.to(one.output.dtype))
    if softmax.sinks is None:  # nobody asks how much there was to see
        return _rescale(output, softmax)
    return finish(Attended(output, torch.logaddexp(one.log_sum, other.log_sum)), softmax)


def finish(attended: Attended, softmax: Softmax) -> torch.Tensor:
    """The output of a layer, ``[..., head_dim]``, once all keys have been seen.

    A sink takes its share of the weight and adds nothing; ``softmax.sinks`` must broadcast to
    ``log_sum`` here.
    """
    output, log_sum = attended
    if softmax.sinks is not None:
        share = torch.sigmoid(log_sum - softmax.sinks.float())
        output = output * share.unsqueeze(-1).to(output.dtype)
    return _rescale(output, softmax)


def _rescale(output: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    return output if softmax.value_scale == 1.0 else output * softmax.value_scale


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores: what is ``hidden`` gets a finite number that outweighs any score."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def hidden_ahead(length: int, device: torch.device) -> torch.Tensor:
    """Of ``length`` queries and as many keys, which lie ahead: ``[length, length]`` bool."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)


def gather_slots(cache: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """``cache[slots]`` for ``[slots, kv_heads, head_dim]`` and ``[L]``, written into scratch."""
    out = scratch[: len(slots)]
    if cache.element_size() == 1:  # torch gathers no numbers of 8 bits but whole ones
        torch.index_select(cache.view(torch.uint8), 0, slots, out=out.view(torch.uint8))
        return out
    return torch.index_select(cache, 0, slots, out=out)


# What scaled_dot_product_attention runs on a CPU, which keeps the log-sum-exp to itself.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
