"""Attend over a part of the keys, and to a prefix that particles share, in plain torch.

The particles of a request share its committed prefix and differ in their tails. So the keys of the
prefix are gathered once per request, and its particles, columns and query heads of a key head are
all queries to them; each particle attends to its own tail, and the two softmaxes are joined by
their log-sum-exp. A query is at the last committed token or after it, so it attends to the whole
prefix: only tails need a causal mask. Rows of one text are one query to the prefix, and requests
that begin with the same slots, as samples of one prompt do, read those once for all. A layer with a
sliding window attends to the prefix's end, and no more of it is gathered. In a block head's layer
all new tokens of a particle attend to each other, and a head may have no keys at the first
positions of a sequence.
"""

from typing import NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_smc.models.chains import MergedRows
from sglang_smc.smc.ledger import AttentionContext

#: Keys of a prefix that are worth the calls by which rows or requests share them.
_LONG = 256


class Softmax(NamedTuple):
    """The parameters of a layer's softmax attention."""

    scaling: float  # factor of the scores, the scale of 8-bit keys included
    cap: float = 0.0  # scores become cap * tanh(score / cap), as in Gemma 2; 0 for no cap
    sinks: torch.Tensor | None = None  # [q_heads] scores of a key without a value, as in gpt-oss
    value_scale: float = 1.0  # of 8-bit values


def softmax_of(layer: RadixAttention, sinks: torch.Tensor | None, is_scaled: bool) -> Softmax:
    """Return the softmax parameters of ``layer``.

    Args:
        sinks: ``[q_heads]``, which some models pass to attention with each call.
        is_scaled: whether keys and values are stored divided by the layer's scales, as 8-bit ones
            are.
    """
    if not is_scaled:
        return Softmax(layer.scaling, layer.logit_cap, sinks)
    of_keys = layer.k_scale_float
    of_values = layer.v_scale_float
    return Softmax(
        layer.scaling * (1.0 if of_keys is None else of_keys),
        layer.logit_cap,
        sinks,
        1.0 if of_values is None else of_values,
    )


class Attended(NamedTuple):
    """The softmax attention over a part of the keys."""

    output: torch.Tensor  # [..., head_dim]
    log_sum: torch.Tensor  # [...] float32, log-sum-exp of the scores


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    softmax: Softmax,
) -> Attended:
    """Compute softmax attention with its log-sum-exp; sinks are left to `finish`.

    Args:
        query: ``[B, H, Q, head_dim]``.
        keys, values: ``[B, H, L, head_dim]``.
        mask: added to the scores, broadcasts to ``[B, H, Q, L]``. A query without visible keys
            needs a finite mask: it gets a mean of all values, with a log-sum-exp that gives it no
            weight. None: the i-th query attends to the keys 0 to i.
    """
    if query.device.type == "cpu" and not softmax.cap:
        options = {"is_causal": mask is None, "attn_mask": mask, "scale": softmax.scaling}
        return Attended(*_flash_attention(query, keys, values, **options))
    if mask is None:
        ahead = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device)
        mask = additive(ahead.triu_(1), query.dtype)
    return attend_anywhere(query, keys, values, mask, softmax)


def attend_anywhere(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    softmax: Softmax,
) -> Attended:
    """Compute `attend` in basic operators, where torch has no kernel for it."""
    scores = (query @ keys.transpose(2, 3)).float() * softmax.scaling
    if softmax.cap:
        scores = softmax.cap * torch.tanh(scores / softmax.cap)
    scores = scores + mask
    log_sum = scores.logsumexp(3)
    weights = (scores - log_sum.unsqueeze(3)).exp()
    return Attended(weights.to(values.dtype) @ values, log_sum)


def join(one: Attended, other: Attended) -> Attended:
    """Return the attention over two disjoint sets of keys."""
    weight = torch.sigmoid(other.log_sum - one.log_sum).unsqueeze(-1)
    output = torch.lerp(one.output, other.output, weight.to(one.output.dtype))
    return Attended(output, torch.logaddexp(one.log_sum, other.log_sum))


def finish(attended: Attended, softmax: Softmax) -> torch.Tensor:
    """Return a layer's output, ``[..., head_dim]``, once all keys are attended.

    A sink takes its share of the weight and adds nothing; ``softmax.sinks`` must broadcast to
    ``log_sum`` here.
    """
    output, log_sum = attended
    if softmax.sinks is not None:
        share = torch.sigmoid(log_sum - softmax.sinks.float())
        output = output * share.unsqueeze(-1).to(output.dtype)
    return output if softmax.value_scale == 1.0 else output * softmax.value_scale


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to scores: a finite number that outweighs any score where ``hidden``."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def gather_slots(cache: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Copy ``cache[slots]``, of ``[slots, kv_heads, head_dim]`` and ``[L]``, into ``scratch``."""
    out = scratch[: len(slots)]
    if cache.element_size() == 1:  # torch gathers 8-bit integers, but no 8-bit floats
        torch.index_select(cache.view(torch.uint8), 0, slots, out=out.view(torch.uint8))
        return out
    return torch.index_select(cache, 0, slots, out=out)


# The CPU kernel of scaled_dot_product_attention, which does not return the log-sum-exp.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Heads(NamedTuple):
    """The attention heads of a model, on each tensor-parallel rank."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    rank: int = 0  # of latents (MLA): width of the value in a key; 0: values are stored apart


class Siblings(NamedTuple):
    """Adjacent requests of a batch whose prefixes begin with the same slots, or a single one."""

    first: int
    last: int  # exclusive
    slots: torch.Tensor  # [S] of the keys that they share, from the first position with one


def find_siblings(context: AttentionContext) -> list[Siblings]:
    """Return the runs of requests that share at least half of their prefixes, if there are any.

    Other requests are then runs of one, so that their length pads no others. The last committed
    token is not shared: each request has a key of its own.
    """
    req_to_token = context.req_to_token
    first_key = context.first_key
    rows, committed, *_ = context.locations
    fewest = first_key + _LONG
    if len(rows) == 1 or committed.max() <= fewest:
        return []
    there = req_to_token[:, :fewest][rows, -1]  # where nobody shares that far, no more is read
    if not (there[1:] == there[:-1]).any():
        return []
    prefix = req_to_token[:, : int(committed.max())][rows]  # [G, P]
    differs = prefix[1:] != prefix[:-1]
    shorter = committed[1:].minimum(committed[:-1]) - 1  # [G - 1]
    common = torch.where(differs.any(1), differs.int().argmax(1), shorter).minimum(shorter)
    joins = (2 * common >= shorter) & (common >= fewest)
    if not joins.any():
        return []
    shared = (committed - 1).tolist()
    found = []
    first = 0
    for last, length in enumerate([*common.where(joins, 0).tolist(), 0], 1):
        if length:
            shared[last] = min(shared[last - 1], length)
            continue
        if shared[last - 1] >= fewest:
            found.append(Siblings(first, last, prefix[first, first_key : shared[last - 1]]))
        first = last
    return found


class SharedPrefixPlan(NamedTuple):
    """The key locations and masks of one forward, shared by layers of one kind."""

    # Prefixes [G * P], without what siblings share; then that; then tails [G * N * T]. Padding
    # repeats a slot of the prefix, so that only the request's own slots are read: all requests
    # write to slot 0, which may so hold NaN, and NaN times a weight of 0 is NaN.
    slots: torch.Tensor
    # Added to the scores: [G, 1, 1, P], where queries differ [G, 1, Q * group, P].
    prefix_mask: torch.Tensor
    # [G * N, 1, C * group, T], the same. None for single particles, whose prefix and tail are one.
    tail_mask: torch.Tensor | None
    # Destinations of the gathers. Fresh pages for every layer would cost more than the copy.
    key_scratch: torch.Tensor  # [len(slots), kv_heads, head_dim]
    value_scratch: torch.Tensor
    siblings: list[Siblings]
    # The N * C rows of a request that attend to its prefix [G, Q], and where each of them finds its
    # own [G, N * C]; None where all attend.
    distinct: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(
        cls,
        cache: torch.Tensor,
        prefixes: torch.Tensor,
        siblings: list[Siblings],
        tails: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor | None],
        distinct: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> "SharedPrefixPlan":
        """Return the plan of these slots, with room for their keys and values."""
        parts = prefixes.flatten(), *(one.slots for one in siblings), tails.flatten()
        slots = torch.cat(parts).long()
        scratch = cache.new_empty(2, len(slots), *cache.shape[1:])
        return cls(slots, *masks, scratch[0], scratch[1], siblings, distinct)


def plan_shared_prefix(
    context: AttentionContext,
    *,
    num_columns: int,
    group: int,
    dtype: torch.dtype,
    cache: torch.Tensor,
    merged: MergedRows | None = None,
) -> SharedPrefixPlan:
    """Plan a forward over C tokens of each of N particles of each of G requests.

    Reads lengths on the host, which waits for the device, and cuts all tensors to them.

    Args:
        context: the keys that are attended to.
        num_columns: C.
        group: query heads per key head.
        dtype: of the queries.
        cache: keys of some layer, ``[slots, kv_heads, head_dim]``.
        merged: the rows whose results are used; None for all.
    """
    req_to_token, tails, locations, starts, window, sees_block, first_key = context
    assert window is None or not sees_block, "checked with the layers"
    rows, committed, particle_rows, _ = locations
    begin = torch.full_like(committed, first_key)  # [G] of a prefix, without what siblings share
    siblings = find_siblings(context) if window is None else []
    for one in siblings:
        begin[one.first : one.last] += len(one.slots)
    if starts.shape[1] == 1 and window is None and not sees_block:
        whole, hidden = _whole_sequences(context, num_columns, begin)
        masks = _of_heads(hidden, group if num_columns > 1 else 1, dtype), None
        return SharedPrefixPlan.of(cache, whole, siblings, rows[:0], masks)
    column = torch.arange(num_columns, device=rows.device)
    begins = committed.clamp_min(first_key)  # [G] where the keys of the tails begin
    # [G, N, C] number of keys of its own tail that each query attends to
    seen = (starts - begins.unsqueeze(1)).unsqueeze(2) + column + 1
    if sees_block:
        seen = seen[:, :, -1:].expand_as(seen)
    # Keys at the end of the prefix that the earliest possible query attends to.
    visible = (committed - begin).clamp(0, None if window is None else window + 1)  # [G]
    longest = torch.stack([visible.amax(), seen.amax()]).clamp_min(1)
    prefix_len, tail_len = longest.tolist()  # waits for the device
    distinct = None
    if merged is not None and (siblings or prefix_len >= _LONG):
        distinct = merged.by_request(len(rows))
    position = torch.arange(max(prefix_len, tail_len), device=rows.device)
    at = position[:prefix_len] + (committed - visible).unsqueeze(1)  # [G, P] in a prefix
    hidden = at >= committed.unsqueeze(1)  # [G, P]
    unseen = position[:tail_len] >= seen.unsqueeze(3)  # [G, N, C, T]
    unwritten = unseen[:, :, -1]  # [G, N, T]
    prefix_mask = additive(hidden, dtype).view(len(rows), 1, 1, prefix_len)
    if window is not None:
        oldest = (seen - 1 - window).unsqueeze(3)  # [G, N, C, 1] first key that a query attends to
        unseen = unseen | (position[:tail_len] < oldest)
        offset = (at - begins.unsqueeze(1)).view(len(rows), 1, 1, -1)  # a tail begins at 0
        left_out = hidden.view(len(rows), 1, 1, -1) | (offset < oldest)  # [G, N, C, P]
        left_out = _distinct(left_out.flatten(1, 2), distinct)  # [G, Q, P]
        prefix_mask = _of_heads(left_out, group, dtype)

    prefix = req_to_token[rows.unsqueeze(1), at.minimum(committed.unsqueeze(1) - 1)]
    place = (begins.view(-1, 1, 1) + position[:tail_len]) & (tails.shape[1] - 1)  # [G, 1, T]
    tails = tails[particle_rows.unsqueeze(2), place]  # [G, N, T]
    unwritten = unwritten | (tails == 0)
    if sees_block:  # padding of a request with fewer columns than others is ahead of its own
        unseen = unseen | unwritten.unsqueeze(2)
    written = prefix[:, :1]
    if first_key:  # the prefix may have no key: then a slot that some particle has written
        of_tails = tails[:, :, :1].masked_fill(unwritten[:, :, :1], 0).amax(1)  # [G, 1]
        written = torch.where(hidden[:, :1], of_tails, written)
    return SharedPrefixPlan.of(
        cache,
        torch.where(hidden, written, prefix),
        siblings,
        torch.where(unwritten, written.unsqueeze(2), tails),
        (prefix_mask, _of_heads(unseen.flatten(0, 1), group, dtype)),
        distinct,
    )


def _whole_sequences(
    context: AttentionContext, num_columns: int, begin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots ``[G, L]`` of requests of one particle, and the hidden keys ``[G, C, L]``.

    Arguments as for `plan_shared_prefix`; sequences are those from ``begin`` ``[G]`` on.
    """
    req_to_token, tails, locations, starts, *_ = context
    rows, committed, particle_rows, max_tail = locations
    end = starts + num_columns  # [G, 1]
    longest = max(int((end - begin.unsqueeze(1)).max()), 1)
    position = begin.unsqueeze(1) + torch.arange(longest, device=rows.device)  # [G, L]
    in_row = position.minimum(committed.unsqueeze(1) - 1)  # [G, L]
    slots = req_to_token[rows.unsqueeze(1), in_row]
    if max_tail:
        in_tail = tails[particle_rows, position & (tails.shape[1] - 1)]
        slots = torch.where(position > in_row, in_tail, slots)
        slots = torch.where((position >= end) | (slots == 0), slots[:, :1], slots)
    column = torch.arange(num_columns, device=rows.device)
    return slots, position.unsqueeze(1) > (starts + column).unsqueeze(2)


def shared_prefix_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    plan: SharedPrefixPlan,
    softmax: Softmax,
) -> torch.Tensor:
    """Compute softmax attention of particles over their shared prefix and tails.

    Args:
        query: ``[G, N, C, q_heads, head_dim]``; heads that share a key head are adjacent.
        keys, values: ``[slots, kv_heads, head_dim]``, the caches of one layer; without values, keys
            are values, too.
        softmax: the layer's parameters.

    Returns:
        The output, in the shape of ``query``.
    """
    size, num_particles, num_columns, _, head_dim = query.shape
    kv_heads = keys.shape[1]
    num_prefix = size * plan.prefix_mask.shape[-1]
    by_row = query.view(size, num_particles * num_columns, kv_heads, -1, head_dim)
    by_key = gather_slots(keys, plan.slots, plan.key_scratch).to(query.dtype)
    by_value = by_key
    if values is not None:
        by_value = gather_slots(values, plan.slots, plan.value_scratch).to(query.dtype)

    def over(query: torch.Tensor, start: int, end: int, mask: torch.Tensor) -> Attended:
        own = slice(start, end)
        key = _by_head(by_key[own], len(query))
        value = _by_head(by_value[own], len(query))
        return attend(query, key, value, mask, softmax)

    group = by_row.shape[3]
    end = num_prefix
    folded = _fold(_distinct(by_row, plan.distinct))  # [G, kv_heads, Q * group, dim]
    prefix = over(folded, 0, end, plan.prefix_mask)
    for one in plan.siblings:
        start = end
        end = end + len(one.slots)
        together = folded[one.first : one.last].transpose(0, 1).flatten(1, 2).unsqueeze(0)
        shared = over(together, start, end, query.new_zeros(1, 1, 1, len(one.slots)))
        _add_shared(prefix, shared, one)
    found = Attended(*(_unfold(part, group) for part in prefix))
    if plan.distinct is not None:
        back = plan.distinct[1]
        found = Attended(*(_of_requests(part, back) for part in found))
    if plan.tail_mask is not None:
        single = query.view(-1, num_columns, *by_row.shape[2:])  # [G * N, C, kv_heads, group, dim]
        tails = over(_fold(single), end, len(plan.slots), plan.tail_mask)
        of_rows = (_unfold(part, group).flatten(0, 1) for part in tails)
        found = join(Attended(*(part.flatten(0, 1) for part in found)), Attended(*of_rows))
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.view(kv_heads, -1))
    return finish(found, softmax).reshape(query.shape)


def _add_shared(prefix: Attended, shared: Attended, one: Siblings) -> None:
    """Join what siblings attend to in common into ``prefix``, in place.

    Args:
        prefix: of all requests, ``[G, kv_heads, Q * group, ...]``.
        shared: of the siblings, ``[1, kv_heads, their number * Q * group, ...]``.
    """
    own = slice(one.first, one.last)
    number = one.last - one.first
    each = (part[0].unflatten(1, (number, -1)).transpose(0, 1) for part in shared)
    both = join(Attended(*(part[own] for part in prefix)), Attended(*each))
    prefix.output[own], prefix.log_sum[own] = both


def _of_requests(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``rows[g, index[g]]`` of each request, ``[G, R, ...]`` and ``[G, Q]``."""
    return rows[torch.arange(len(rows), device=rows.device).unsqueeze(1), index]


def _distinct(
    rows: torch.Tensor, distinct: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Return the rows ``[G, N * C, ...]`` that attend to prefixes, ``[G, Q, ...]``."""
    return rows if distinct is None else _of_requests(rows, distinct[0])


def _fold(rows: torch.Tensor) -> torch.Tensor:
    """Reshape ``[B, R, kv_heads, group, dim]`` to ``[B, kv_heads, R * group, dim]``."""
    return rows.transpose(1, 2).flatten(2, 3)


def _unfold(folded: torch.Tensor, group: int) -> torch.Tensor:
    """Reshape ``[B, kv_heads, R * group, ...]`` to ``[B, R, kv_heads, group, ...]``."""
    return folded.unflatten(2, (-1, group)).transpose(1, 2)


def _of_heads(hidden: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return hidden keys ``[rows, Q, L]`` as an additive mask ``[rows, 1, Q * group, L]``."""
    mask = additive(hidden, dtype).unsqueeze(1)
    return mask if group == 1 else mask.repeat_interleave(group, dim=2)


def _by_head(gathered: torch.Tensor, rows: int) -> torch.Tensor:
    """Reshape ``[rows * L, kv_heads, head_dim]`` to ``[rows, kv_heads, L, head_dim]``."""
    return gathered.unflatten(0, (rows, -1)).transpose(1, 2)
