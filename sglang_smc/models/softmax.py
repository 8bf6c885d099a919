"""Attend over a part of the keys, and to a prefix that particles share, in plain torch.

The particles of a request share its committed prefix and differ in their tails. So the keys of the
prefix are gathered once per request, and its particles, columns and query heads of a key head are
all queries to them; each particle attends to its own tail, and the two softmaxes are joined by
their log-sum-exp. A query is at the last committed token or after it, so it attends to the whole
prefix: only tails need a causal mask. Rows of one text are one query to the prefix, and requests
that begin with the same slots, as samples of one prompt do, read those once for all. A layer with a
sliding window attends to the prefix's end, and no more of it is gathered but the first keys, where
it attends to them at any distance. In a block head's layer all new tokens of a particle attend to
each other, and a head may have no keys at the first positions of a sequence.
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
    rows = context.locations.rows
    committed = context.locations.committed
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
    window = context.window
    if window is not None and _last_query(context, num_columns) <= context.first_key + window:
        window = None  # which leaves nothing out
        context = context._replace(window=None, sink=0)
    # [G] of a prefix, without what siblings share
    begin = torch.full_like(context.locations.committed, context.first_key)
    siblings = find_siblings(context) if window is None else []
    for one in siblings:
        begin[one.first : one.last] += len(one.slots)
    if context.starts.shape[1] == 1 and window is None and not context.sees_block:
        whole, hidden = _whole_sequences(context, num_columns, begin)
        masks = _of_heads(hidden, group if num_columns > 1 else 1, dtype), None
        return SharedPrefixPlan.of(cache, whole, siblings, whole[:0], masks)
    keys = _visible_keys(context, num_columns, begin)
    distinct = None
    if merged is not None and (siblings or keys.hidden.shape[1] >= _LONG):
        distinct = merged.by_request(len(begin))
    prefixes = _plan_prefixes(context, keys)
    tails, unseen, unwritten = _plan_tails(context, keys)
    written = prefixes[:, :1]
    if context.first_key:  # the prefix may have no key: then a slot that some particle has written
        of_tails = tails[:, :, :1].masked_fill(unwritten[:, :, :1], 0).amax(1)  # [G, 1]
        written = torch.where(keys.hidden[:, :1], of_tails, written)
    return SharedPrefixPlan.of(
        cache,
        torch.where(keys.hidden, written, prefixes),
        siblings,
        torch.where(unwritten, written.unsqueeze(2), tails),
        (
            _prefix_mask(context, keys, distinct, group, dtype),
            _of_heads(unseen.flatten(0, 1), group, dtype),
        ),
        distinct,
    )


def _last_query(context: AttentionContext, num_columns: int) -> int:
    """Return the position of the last query of any particle, and wait for the device."""
    return int(context.starts.max()) + num_columns - 1


class _VisibleKeys(NamedTuple):
    """The keys that some query of a forward attends to."""

    # [G, P] int64, up to the end of the longest prefix; behind them the first, beside a window
    positions: torch.Tensor
    hidden: torch.Tensor  # [G, P] bool: those beyond the request's own prefix, or there already
    begins: torch.Tensor  # [G] int64 position where the keys of the tails begin
    tail: torch.Tensor  # [T] int64, from 0 on: places in a tail
    own: torch.Tensor  # [G, N, C] int64 keys of its own tail up to a query's own, which is counted
    seen: torch.Tensor  # [G, N, C] int64, the same up to the last that a query sees


def _visible_keys(context: AttentionContext, num_columns: int, begin: torch.Tensor) -> _VisibleKeys:
    """Return the keys that are attended to; arguments as for `_whole_sequences`.

    Waits for the device, once.
    """
    committed = context.locations.committed
    window = context.window
    column = torch.arange(num_columns, device=begin.device)
    begins = committed.clamp_min(context.first_key)
    own = (context.starts - begins.unsqueeze(1)).unsqueeze(2) + column + 1
    seen = own[:, :, -1:].expand_as(own) if context.sees_block else own
    # Keys at the end of the prefix that the earliest possible query attends to.
    visible = (committed - begin).clamp(0, None if window is None else window + 1)  # [G]
    longest = torch.stack([visible.amax(), seen.amax()]).clamp_min(1)
    prefix_len, tail_len = longest.tolist()  # waits for the device
    place = torch.arange(max(prefix_len, tail_len), device=begin.device)
    positions = place[:prefix_len] + (committed - visible).unsqueeze(1)
    hidden = positions >= committed.unsqueeze(1)
    if context.sink:
        first = context.first_key + torch.arange(context.sink, device=begin.device)
        first = first.expand(len(committed), -1)
        positions = torch.cat([positions, first], dim=1)
        hidden = torch.cat([hidden, first >= (committed - visible).unsqueeze(1)], dim=1)
    return _VisibleKeys(positions, hidden, begins, place[:tail_len], own, seen)


def _plan_prefixes(context: AttentionContext, keys: _VisibleKeys) -> torch.Tensor:
    """Return the slots of prefixes, ``[G, P]``; beyond a prefix that of its last key."""
    rows = context.locations.rows.unsqueeze(1)
    last = context.locations.committed.unsqueeze(1) - 1
    return context.req_to_token[rows, keys.positions.minimum(last)]


def _prefix_mask(
    context: AttentionContext,
    keys: _VisibleKeys,
    distinct: tuple[torch.Tensor, torch.Tensor] | None,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `SharedPrefixPlan.prefix_mask`; all queries have one mask but in a window."""
    hidden = keys.hidden[:, None, None]  # [G, 1, 1, P]
    if context.window is None:
        return additive(hidden, dtype)
    offset = keys.positions - keys.begins.unsqueeze(1)  # a tail begins at 0
    left_out = hidden | _is_left_out(context, keys, offset[:, None, None])  # [G, N, C, P]
    return _of_heads(_distinct(left_out.flatten(1, 2), distinct), group, dtype)


def _plan_tails(
    context: AttentionContext, keys: _VisibleKeys
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slots of tails ``[G, N, T]``, and of these which keys to leave out.

    Returns:
        Slots; whether a query does not attend to a key, ``[G, N, C, T]`` bool; and whether no query
        does, or there is no key, ``[G, N, T]`` bool.
    """
    unseen = keys.tail >= keys.seen.unsqueeze(3)
    unwritten = unseen[:, :, -1]
    if context.window is not None:
        unseen = unseen | _is_left_out(context, keys, keys.tail)
    place = keys.begins.view(-1, 1, 1) + keys.tail  # [G, 1, T]
    in_ring = place & (context.tails.shape[1] - 1)
    slots = context.tails[context.locations.particle_rows.unsqueeze(2), in_ring]
    unwritten = unwritten | (slots == 0)
    if (
        context.sees_block
    ):  # padding of a request with fewer columns than others is ahead of its own
        unseen = unseen | unwritten.unsqueeze(2)
    return slots, unseen, unwritten


def _is_left_out(
    context: AttentionContext, keys: _VisibleKeys, offset: torch.Tensor
) -> torch.Tensor:
    """Return which keys are before a query's window and not among the first, ``[G, N, C, L]``.

    Args:
        offset: of the keys from the first of a tail, broadcasts to the result.
    """
    assert context.window is not None, "the caller's case"
    oldest = (keys.own - 1 - context.window).unsqueeze(3)  # [G, N, C, 1]
    end_of_first = context.first_key + context.sink - keys.begins  # [G]
    return (offset < oldest) & (offset >= end_of_first.view(-1, 1, 1, 1))


def _whole_sequences(
    context: AttentionContext, num_columns: int, begin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots ``[G, L]`` of requests of one particle, and the hidden keys ``[G, C, L]``.

    Arguments as for `plan_shared_prefix`; sequences are those from ``begin`` ``[G]`` on.
    """
    locations = context.locations
    tails = context.tails
    end = context.starts + num_columns  # [G, 1]
    longest = max(int((end - begin.unsqueeze(1)).max()), 1)
    position = begin.unsqueeze(1) + torch.arange(longest, device=begin.device)  # [G, L]
    in_row = position.minimum(locations.committed.unsqueeze(1) - 1)  # [G, L]
    slots = context.req_to_token[locations.rows.unsqueeze(1), in_row]
    if locations.max_tail:
        in_tail = tails[locations.particle_rows, position & (tails.shape[1] - 1)]
        slots = torch.where(position > in_row, in_tail, slots)
        slots = torch.where((position >= end) | (slots == 0), slots[:, :1], slots)
    column = torch.arange(num_columns, device=begin.device)
    return slots, position.unsqueeze(1) > (context.starts + column).unsqueeze(2)


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
    kv_heads = keys.shape[1]
    gathered = _Gathered.of(keys, values, plan, query.dtype)
    if plan.tail_mask is None and query.shape[2] == 1 and not plan.siblings:
        of_tokens = query.view(len(query), kv_heads, -1, query.shape[4])
        found = gathered.attend(of_tokens, slice(None), plan.prefix_mask, softmax)
    else:
        found = _attend_to_all(query, gathered, plan, softmax)
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.view(kv_heads, -1))
    return finish(found, softmax).reshape(query.shape)


class _Gathered(NamedTuple):
    """Keys and values of a plan's slots, ``[L, kv_heads, head_dim]`` each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        plan: SharedPrefixPlan,
        dtype: torch.dtype,
    ) -> "_Gathered":
        of_slots = gather_slots(keys, plan.slots, plan.key_scratch).to(dtype)
        if values is None:
            return cls(of_slots, of_slots)
        return cls(of_slots, gather_slots(values, plan.slots, plan.value_scratch).to(dtype))

    def attend(
        self, query: torch.Tensor, own: slice, mask: torch.Tensor, softmax: Softmax
    ) -> Attended:
        """Attend to the slots ``own``, of as many sequences as queries have, one after another."""
        keys = _by_head(self.keys[own], len(query))
        values = _by_head(self.values[own], len(query))
        return attend(query, keys, values, mask, softmax)


def _attend_to_all(
    query: torch.Tensor, gathered: _Gathered, plan: SharedPrefixPlan, softmax: Softmax
) -> Attended:
    """Attend to prefixes and tails; the result has a place for each row, key head and query."""
    size, _, num_columns, num_heads, head_dim = query.shape
    kv_heads = gathered.keys.shape[1]
    by_row = query.view(size, -1, kv_heads, num_heads // kv_heads, head_dim)
    found = _attend_to_prefixes(by_row, gathered, plan, softmax)
    if plan.tail_mask is None:
        return found
    by_particle = query.view(-1, num_columns, *by_row.shape[2:])
    tails = _attend_to_tails(by_particle, gathered, plan.tail_mask, softmax)
    return join(Attended(*(part.flatten(0, 1) for part in found)), tails)


def _attend_to_prefixes(
    rows: torch.Tensor, gathered: _Gathered, plan: SharedPrefixPlan, softmax: Softmax
) -> Attended:
    """Attend to prefixes, ``[G, N * C, kv_heads, group, head_dim]``; rows of one text do once."""
    group = rows.shape[3]
    folded = _fold(_distinct(rows, plan.distinct))  # [G, kv_heads, Q * group, dim]
    end = len(rows) * plan.prefix_mask.shape[-1]
    prefix = gathered.attend(folded, slice(end), plan.prefix_mask, softmax)
    for one in plan.siblings:
        own = slice(end, end + len(one.slots))
        end = own.stop
        together = folded[one.first : one.last].transpose(0, 1).flatten(1, 2).unsqueeze(0)
        mask = rows.new_zeros(1, 1, 1, len(one.slots))
        _add_shared(prefix, gathered.attend(together, own, mask, softmax), one)
    found = Attended(*(_unfold(part, group) for part in prefix))
    if plan.distinct is None:
        return found
    back = plan.distinct[1]
    return Attended(*(_of_requests(part, back) for part in found))


def _attend_to_tails(
    rows: torch.Tensor, gathered: _Gathered, mask: torch.Tensor, softmax: Softmax
) -> Attended:
    """Attend to tails, the last slots of a plan.

    Args:
        rows: ``[G * N, C, kv_heads, group, head_dim]``.
        mask: `SharedPrefixPlan.tail_mask`.

    Returns:
        The attention of all rows, ``[G * N * C, kv_heads, group, ...]``.
    """
    own = slice(len(gathered.keys) - len(rows) * mask.shape[-1], None)
    tails = gathered.attend(_fold(rows), own, mask, softmax)
    return Attended(*(_unfold(part, rows.shape[3]).flatten(0, 1) for part in tails))


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
