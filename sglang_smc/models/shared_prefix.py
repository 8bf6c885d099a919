"""Attention of particles that share a prefix, in plain torch.

The particles of a request agree on its committed text and differ in their tails. So the keys of
that text are gathered once per request, and its particles, columns and query heads of a key head
are all queries to them; each particle's tail is attended to by itself, and the two softmaxes are
joined by their log-sum-exp. A query stands at the last committed token or behind it, so it sees
the whole prefix: only tails need a causal mask. A layer with a window sees the prefix's end, and
no more of it is gathered. A block head's layer sees all new tokens of a particle, and a head may
have no keys at the first positions of a text.
"""

from typing import NamedTuple

import torch

from sglang_smc.models.softmax import Attended, Softmax, additive, attend, gather_slots, join


class Heads(NamedTuple):
    """The attention of a model, on each tensor-parallel rank."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    rank: int = 0  # of latents (MLA): numbers of a key that are its value; 0: there are values


class SharedPrefixPlan(NamedTuple):
    """Where the keys of one forward stand, and who sees them: the same in layers of one kind."""

    # Prefixes [G * P], then tails [G * N * T]. Padding repeats a slot of the prefix, so that only
    # the request's own slots are read: all write to slot 0, and what one leaves there may be NaN,
    # of which a weight of 0 makes NaN.
    slots: torch.Tensor
    # Added to the scores: [G, 1, 1, P], with a window [G, 1, N * C * group, P].
    prefix_mask: torch.Tensor
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
    window: int | None = None,
    sees_block: bool = False,
    first_key: int = 0,
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
        window: how many keys before its own a query sees; None for all.
        sees_block: whether a query sees all new tokens of its particle that have slots of their
            own, also those ahead of it. Not with a window.
        first_key: the first position that has a key: nobody sees those before it. What a query
            there gets has no meaning.
    """
    assert window is None or not sees_block, "checked with the layers"
    column = torch.arange(num_columns, device=rows.device)
    begins = committed.clamp_min(first_key)  # [G] where the keys of the tails begin
    # [G, N, C] keys of its own tail that each query sees
    seen = (starts - begins.unsqueeze(1)).unsqueeze(2) + column + 1
    if sees_block:
        seen = seen[:, :, -1:].expand_as(seen)
    # Of a prefix, what the earliest query sees that there may be, which stands at its end.
    visible = (committed - first_key).clamp(0, None if window is None else window + 1)  # [G]
    prefix_len, tail_len = _host_sizes(visible, seen)
    position = torch.arange(max(prefix_len, tail_len), device=rows.device)
    at = position[:prefix_len] + (committed - visible).unsqueeze(1)  # [G, P] in a prefix
    hidden = at >= committed.unsqueeze(1)  # [G, P]
    unseen = position[:tail_len] >= seen.unsqueeze(3)  # [G, N, C, T]
    unwritten = unseen[:, :, -1]  # [G, N, T]
    prefix_mask = additive(hidden, dtype).view(len(rows), 1, 1, prefix_len)
    if window is not None:
        oldest = (seen - 1 - window).unsqueeze(3)  # [G, N, C, 1] key that a query sees
        unseen = unseen | (position[:tail_len] < oldest)
        behind = (at - begins.unsqueeze(1)).view(len(rows), 1, 1, -1)  # a tail begins at 0
        left_out = hidden.view(len(rows), 1, 1, -1) | (behind < oldest)  # [G, N, C, P]
        prefix_mask = _of_heads(left_out.flatten(1, 2), group, dtype)

    prefix = req_to_token[rows.unsqueeze(1), at.minimum(committed.unsqueeze(1) - 1)]
    place = (begins.view(-1, 1, 1) + position[:tail_len]) & (tails.shape[1] - 1)  # [G, 1, T]
    tails = tails[particle_rows.unsqueeze(2), place]  # [G, N, T]
    unwritten = unwritten | (tails == 0)
    if sees_block:  # what pads a request with fewer columns than others is ahead of its own
        unseen = unseen | unwritten.unsqueeze(2)
    written = prefix[:, :1]
    if first_key:  # nothing of a prefix may be left: then what some particle has written
        of_tails = tails[:, :, :1].masked_fill(unwritten[:, :, :1], 0).amax(1)  # [G, 1]
        written = torch.where(hidden[:, :1], of_tails, written)
    slots = torch.cat(
        [
            torch.where(hidden, written, prefix).flatten(),
            torch.where(unwritten, written.unsqueeze(2), tails).flatten(),
        ]
    ).long()
    return SharedPrefixPlan(
        slots=slots,
        prefix_mask=prefix_mask,
        tail_mask=_of_heads(unseen.flatten(0, 1), group, dtype),
        key_scratch=cache.new_empty(len(slots), *cache.shape[1:]),
        value_scratch=cache.new_empty(len(slots), *cache.shape[1:]),
    )


def shared_prefix_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: SharedPrefixPlan,
    softmax: Softmax,
) -> torch.Tensor:
    """Softmax attention of particles over what they see of their prefix and tails.

    Args:
        query: ``[G, N, C, q_heads, head_dim]``; heads that share a key head stand together.
        keys, values: ``[slots, kv_heads, head_dim]``, the caches of one layer.
        softmax: what the layer makes of its scores.

    Returns:
        The shape of ``query``.
    """
    size, num_particles, num_columns, _, head_dim = query.shape
    kv_heads, num_prefix = keys.shape[1], size * plan.prefix_mask.shape[-1]
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
        softmax,
    )
    tails = attend(
        per_particle,  # [G * N, kv_heads, C * group, dim]
        _by_head(keys[num_prefix:], size * num_particles),
        _by_head(values[num_prefix:], size * num_particles),
        plan.tail_mask,
        softmax,
    )
    if softmax.sinks is not None:  # [G * N * C * group, kv_heads], as the parts stand
        by_head = softmax.sinks.view(kv_heads, -1).t().repeat(query[..., 0, 0].numel(), 1)
        softmax = softmax._replace(sinks=by_head)
    joined = join(
        _by_query(prefix), _by_query(tails), softmax
    )  # [G * N * C * group, kv_heads, dim]
    unfolded = joined.view(size, num_particles, num_columns, -1, kv_heads, head_dim)
    return unfolded.transpose(3, 4).reshape(query.shape)


def _host_sizes(prefixes: torch.Tensor, seen: torch.Tensor) -> tuple[int, int]:
    """The longest prefix and the longest tail of a batch, at least 1. Waits for the device."""
    prefix_len, tail_len = torch.stack([prefixes.amax(), seen.amax()]).clamp_min(1).tolist()
    return prefix_len, tail_len


def _of_heads(hidden: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """What queries do not see, ``[rows, Q, L]``, as a mask ``[rows, 1, Q * group, L]``."""
    return additive(hidden, dtype).repeat_interleave(group, dim=1).unsqueeze(1)


def _by_head(gathered: torch.Tensor, rows: int) -> torch.Tensor:
    """``[rows * L, kv_heads, head_dim]`` as ``[rows, kv_heads, L, head_dim]``."""
    return gathered.unflatten(0, (rows, -1)).transpose(1, 2)


def _by_query(attended: Attended) -> Attended:
    """Attention ``[B, H, Q, ...]`` as ``[B * Q, H, ...]``."""
    return Attended(*(part.transpose(1, 2).flatten(0, 1) for part in attended))
