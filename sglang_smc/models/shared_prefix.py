"""Attention of particles that share a prefix, in plain torch.

The particles of a request agree on its committed text and differ in their tails. So the keys of
that text are gathered once per request, and its particles, columns and query heads of a key head
are all queries to them; each particle's tail is attended to by itself, and the two softmaxes are
joined by their log-sum-exp. A query stands at the last committed token or behind it, so it sees
the whole prefix: only tails need a causal mask.
"""

from typing import NamedTuple

import torch


class SharedPrefixPlan(NamedTuple):
    """Where the keys of one forward stand, and who sees them: the same in all layers."""

    # Prefixes [G * P], then tails [G * N * T]. Padding repeats a slot of the prefix, so that only
    # the request's own slots are read: all write to slot 0, and what one leaves there may be NaN,
    # of which a weight of 0 makes NaN.
    slots: torch.Tensor
    prefix_mask: torch.Tensor  # [G, 1, 1, P], added to the scores
    tail_mask: torch.Tensor  # [G * N, 1, C * group, T], the same
    # Destinations of the gathers. Fresh pages for every layer would cost more than the copy.
    key_scratch: torch.Tensor  # [G * P + G * N * T, kv_heads, head_dim]
    value_scratch: torch.Tensor


def plan_shared_prefix(
    req_to_token: torch.Tensor,
    tails: torch.Tensor,
    rows: torch.Tensor,
    committed: torch.Tensor,
    particle_rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    num_columns: int,
    group: int,
    dtype: torch.dtype,
    cache: torch.Tensor,
) -> SharedPrefixPlan:
    """Plan a forward over C tokens of each of N particles of each of G requests.

    Reads lengths on the host, and cuts all tensors to them.

    Args:
        req_to_token: ``[rows, width]`` slots by row and position.
        tails: ``[rows, W]`` slots by row and position modulo W, a power of two.
        rows, committed: ``[G]`` rows of the shared prefixes and their lengths, at least 1.
        particle_rows, starts: ``[G, N]`` rows of the tails, which begin at ``committed``, and the
            position of each particle's first token, at least ``committed - 1``.
        num_columns: C.
        group: query heads per key head.
        dtype: of the queries.
        cache: keys of some layer, ``[slots, kv_heads, head_dim]``.
    """
    column = torch.arange(num_columns, device=rows.device)
    # [G, N, C] keys of its own tail that each query sees
    seen = (starts - committed.unsqueeze(1)).unsqueeze(2) + column + 1
    prefix_len, tail_len = _host_sizes(committed, seen)
    position = torch.arange(max(prefix_len, tail_len), device=rows.device)
    hidden = position[:prefix_len] >= committed.unsqueeze(1)  # [G, P]
    unseen = position[:tail_len] >= seen.unsqueeze(3)  # [G, N, C, T]

    prefix = req_to_token[rows.unsqueeze(1), position[:prefix_len]]
    place = (committed.view(-1, 1, 1) + position[:tail_len]) & (tails.shape[1] - 1)  # [G, 1, T]
    tails = tails[particle_rows.unsqueeze(2), place]  # [G, N, T]
    written = prefix[:, :1]
    slots = torch.cat(
        [
            torch.where(hidden, written, prefix).flatten(),
            torch.where(unseen[:, :, -1] | (tails == 0), written.unsqueeze(2), tails).flatten(),
        ]
    ).long()
    tail_mask = _additive(unseen.flatten(0, 1), dtype).repeat_interleave(group, dim=1)
    return SharedPrefixPlan(
        slots=slots,
        prefix_mask=_additive(hidden, dtype).view(len(rows), 1, 1, prefix_len),
        tail_mask=tail_mask.unsqueeze(1),
        key_scratch=cache.new_empty(len(slots), *cache.shape[1:]),
        value_scratch=cache.new_empty(len(slots), *cache.shape[1:]),
    )


def shared_prefix_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: SharedPrefixPlan,
    scaling: float,
) -> torch.Tensor:
    """Causal softmax attention of particles over their prefix and tails.

    Args:
        query: ``[G, N, C, q_heads, head_dim]``; heads that share a key head stand together.
        keys, values: ``[slots, kv_heads, head_dim]``, the caches of one layer.
        scaling: factor of the scores, before the softmax.

    Returns:
        The shape of ``query``.
    """
    size, num_particles, num_columns, _, head_dim = query.shape
    kv_heads, num_prefix = keys.shape[1], plan.prefix_mask.numel()
    grouped = query.view(size, num_particles, num_columns, kv_heads, -1, head_dim)
    folded = grouped.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)  # [G, kv_heads, N * C * group, dim]
    per_particle = folded.unflatten(2, (num_particles, -1)).transpose(1, 2).flatten(0, 1)

    keys = gather_slots(keys, plan.slots, plan.key_scratch).to(query.dtype)
    values = gather_slots(values, plan.slots, plan.value_scratch).to(query.dtype)
    prefix = attend(
        folded,
        _by_head(keys[:num_prefix], size),
        _by_head(values[:num_prefix], size),
        plan.prefix_mask,
        scaling,
    )
    tails = attend(
        per_particle,  # [G * N, kv_heads, C * group, dim]
        _by_head(keys[num_prefix:], size * num_particles),
        _by_head(values[num_prefix:], size * num_particles),
        plan.tail_mask,
        scaling,
    )
    joined = merge(_by_query(prefix), _by_query(tails))  # [G * N * C * group, kv_heads, dim]
    unfolded = joined.view(size, num_particles, num_columns, -1, kv_heads, head_dim)
    return unfolded.transpose(3, 4).reshape(query.shape)


class Attended(NamedTuple):
    """Softmax attention over some of the keys."""

    output: torch.Tensor  # [..., head_dim]
    log_sum: torch.Tensor  # [...] float32, log-sum-exp of the scores


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> Attended:
    """Softmax attention that also tells how much there was to see.

    Args:
        query: ``[B, H, Q, head_dim]``.
        keys, values: ``[B, H, L, head_dim]``.
        mask: added to the scores, broadcasts to ``[B, 1, Q, L]``; finite, so that a query which
            sees no key gets a mean of all values, with a log-sum-exp that gives it no weight.
    """
    if query.device.type == "cpu":
        return Attended(*_flash_attention(query, keys, values, attn_mask=mask, scale=scaling))
    return attend_anywhere(query, keys, values, mask, scaling)


def attend_anywhere(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> Attended:
    """`attend` written out, where torch has no kernel for it."""
    scores = (query @ keys.transpose(2, 3)).float() * scaling + mask
    log_sum = scores.logsumexp(3)
    weights = (scores - log_sum.unsqueeze(3)).exp()
    return Attended(weights.to(values.dtype) @ values, log_sum)


def merge(one: Attended, other: Attended) -> torch.Tensor:
    """Attention over the union of two disjoint sets of keys: the outputs' weighted mean."""
    weight = torch.sigmoid(other.log_sum - one.log_sum).unsqueeze(-1)
    return torch.lerp(one.output, other.output, weight.to(one.output.dtype))


def gather_slots(cache: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """``cache[slots]`` for ``[slots, kv_heads, head_dim]`` and ``[L]``, written into scratch."""
    out = scratch[: len(slots)]
    return torch.index_select(cache, 0, slots, out=out)


# What scaled_dot_product_attention runs on a CPU, which keeps the log-sum-exp to itself.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _host_sizes(committed: torch.Tensor, seen: torch.Tensor) -> tuple[int, int]:
    """The longest prefix and the longest tail of a batch, at least 1. Waits for the device."""
    prefix_len, tail_len = torch.stack([committed.amax(), seen.amax()]).tolist()
    return prefix_len, max(tail_len, 1)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, torch.finfo(dtype).min
    )


def _by_head(gathered: torch.Tensor, rows: int) -> torch.Tensor:
    """``[rows * L, kv_heads, head_dim]`` as ``[rows, kv_heads, L, head_dim]``."""
    return gathered.unflatten(0, (rows, -1)).transpose(1, 2)


def _by_query(attended: Attended) -> Attended:
    """Attention ``[B, H, Q, ...]`` as ``[B * Q, H, ...]``."""
    return Attended(*(part.transpose(1, 2).flatten(0, 1) for part in attended))
