"""Find the tokens that top-k, top-p and min-p keep.

All three keep the first tokens of one order: by descending logit, ties by ascending id. So a few
numbers per row describe the kept set, and no row is sorted. Logits lie in *buckets*, whose bounds
are multiples of a power of two, whatever the row's largest logit is: so tokens can be counted
before it is known. Buckets have 256 *cells*, a token's key. Tokens of one cell count as equally
likely, lowest id first; so do all in the last bucket, which has no end.

The rules are those of SGLang's sampler: temperature first, then, on the same probabilities
("joint"), a rank below top_k, a mass of the preceding tokens of at most top_p, and a p of at least
min_p times the largest. Each is exact up to the order within the one cell where the row is cut.
"""

from typing import NamedTuple

import torch

NUM_BUCKETS = 128  # of a row, down from that of its largest logit
NUM_CELLS = 256  # of a bucket
NUM_KEYS = NUM_BUCKETS * NUM_CELLS
EXTENT = 31.0  # nats below the likeliest token; less likely tokens are in the last bucket
SPREAD = 128.0  # and so are smaller logits than the largest less this
_LEVELS = ((8, NUM_BUCKETS), (0, NUM_CELLS))  # per search level: bits of a key below, and digits
_ENTRIES = 1 << 18  # logits that are processed at once, so that wide types stay in the cache
_MASS_UNIT = 2.0**-44  # of the likeliest token's mass: integer sums do not depend on the order


class KeptTokens(NamedTuple):
    """Tokens that filters keep, of R rows of logits."""

    above: torch.Tensor  # [R] float32: of smaller logits tokens are kept up to `last`
    lowest: torch.Tensor  # [R] float32: tokens of smaller logits are cut
    last: torch.Tensor  # [R] int32: an id

    def at(self, rows: torch.Tensor | None) -> "KeptTokens":
        """Return the kept tokens of each draw's row, ``[D]``; None is one draw per row."""
        return self if rows is None else KeptTokens._make(field[rows] for field in self)

    def dropped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return which logits ``[R, V]`` are cut, bool; NaN is never cut, so that it propagates."""
        token = torch.arange(logits.shape[1], device=logits.device)
        after = (logits < self.above.unsqueeze(1)) & (token > self.last.unsqueeze(1))
        return after | (logits < self.lowest.unsqueeze(1))


def keep_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> KeptTokens:
    """Return the tokens that each request's filters keep.

    All tokens are kept in a row of a greedy request (top_k = 1), which needs no filter, and in a
    row that gives no distribution: with NaN or ``inf``, or with nothing but ``-inf``.

    Args:
        logits: ``[R, V]``, any float type; ``-inf`` marks a forbidden token, which has no rank.
        temperature: ``[G]`` float32 > 0, each for R / G consecutive rows.
        top_k: ``[G]`` int64 >= 1; anything >= V keeps all.
        top_p: ``[G]`` float32 in (0, 1].
        min_p: ``[G]`` float32 in [0, 1].
    """
    rules = (
        of_groups.unsqueeze(1).expand(-1, len(logits) // len(temperature)).flatten()
        for of_groups in (temperature, top_k, top_p, min_p)
    )
    size = max(1, _ENTRIES // max(logits.shape[1], 256))
    parts = zip(*(tensor.split(size) for tensor in (logits, *rules)), strict=True)
    found = [_keep(some.float(), *of_some) for some, *of_some in parts]
    return KeptTokens._make(torch.cat(field) for field in zip(*found, strict=True))


def _keep(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> KeptTokens:
    """Apply `keep_tokens` to a few rows, float32, each with its own settings."""
    exists = logits > -torch.inf
    peak = logits.amax(1)  # [R]
    unit = unit_of(temperature, top_p, logits.shape[1])
    top = (peak * unit).floor()  # [R] the bucket of the largest, from zero
    keys = keys_of(logits, top, unit)
    scaled = logits / temperature.unsqueeze(1)
    masses = (scaled - scaled.amax(1, keepdim=True)).exp()
    of_tokens = torch.stack([exists.long(), (masses.double() / _MASS_UNIT).long()])
    key, num_left = _search(keys, of_tokens, top_k, top_p)
    running = ((keys == key) & exists).cumsum(1, dtype=torch.int32)  # [R, V]
    last = (running < num_left).sum(1)
    # inf - inf: in a row without a distribution the masses are NaN.
    filters = (top_k > 1) & ~masses.sum(1).isnan()
    is_cut = filters & ((exists.sum(1) >= top_k) | (top_p < 1))
    above, lowest = (bound.where(is_cut, -torch.inf) for bound in bounds_of(key, top, unit))
    by_min_p = (peak + temperature.double() * min_p.double().log()).float()
    by_min_p = by_min_p.where(filters & (min_p > 0), -torch.inf)
    return KeptTokens(above=above, lowest=lowest.maximum(by_min_p), last=last.int())


def _search(
    keys: torch.Tensor, of_tokens: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key at which top-k or top-p is reached, and how many of its tokens are kept.

    Args:
        keys: ``[R, V]``.
        of_tokens: ``[2, R, V]`` int64: 1 for each that may be drawn, and its mass.
        top_k, top_p: ``[R]``.

    Returns:
        Both ``[R, 1]``.
    """
    share = top_p.double()
    everything = torch.iinfo(torch.int64).max
    target = torch.where(share < 1, (share * of_tokens[1].sum(1)).long(), everything)
    # A token is kept while the count, and the mass, of the tokens before it are within these.
    limits = torch.stack([top_k - 1, target]).unsqueeze(2)  # [2, R, 1]
    first = torch.zeros_like(keys[:, :1])
    before = torch.zeros_like(limits)
    own = limits
    for bits, size in _LEVELS:
        bucket = (keys - first) >> bits
        bucket = torch.where((bucket >= 0) & (bucket < size), bucket, size).long()
        sums = of_tokens.new_zeros(*limits.shape[:2], size + 1)
        sums = sums.scatter_add(2, bucket.expand_as(of_tokens), of_tokens)[..., :size]
        through = before + sums.cumsum(2)  # [2, R, size]
        at = _first((through > limits).any(0), sums[0] > 0)
        own = sums.gather(2, at.expand_as(limits))
        before = through.gather(2, at.expand_as(limits)) - own
        first = first + (at << bits).int()
    within = ((limits - before) / (own.double() / own[:1])).floor() + 1
    return first, within.nan_to_num(torch.inf).amin(0).minimum(own[0]).clamp_min(1)


def _first(reached: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Return the first bucket that is reached and has tokens, ``[R, B]`` to ``[R, 1]``.

    Where rounding leaves none, it is the last bucket that has tokens.
    """
    size = exists.shape[1]
    place = torch.arange(size, device=exists.device)
    return torch.where(reached, 2 * size - place, place).mul(exists).argmax(1, keepdim=True)


def keys_of(logits: torch.Tensor, top: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return the keys of logits, ``[R, V]`` int32; the key of a NaN is arbitrary."""
    steps = logits * unit.unsqueeze(1)
    whole = steps.floor()
    bucket = (top.unsqueeze(1) - whole).clamp_max(NUM_BUCKETS - 1)
    cell = NUM_CELLS - 1 - ((steps - whole) * NUM_CELLS).floor()
    cell = cell.where(bucket < NUM_BUCKETS - 1, 0.0)
    return (bucket * NUM_CELLS + cell).nan_to_num(0.0).int()


def bounds_of(
    key: torch.Tensor, top: torch.Tensor, unit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least logits ``[R]`` above a cell ``[R, 1]`` and in it."""
    bucket = key.squeeze(1) // NUM_CELLS
    cell = key.squeeze(1) % NUM_CELLS
    is_last = bucket == NUM_BUCKETS - 1
    lowest = (top - bucket + (NUM_CELLS - 1 - cell) / NUM_CELLS) / unit
    above = lowest + 1 / (unit * NUM_CELLS)
    # Where float32 has no number between, the next one.
    above = above.maximum(lowest.nextafter(torch.full_like(lowest, torch.inf)))
    return above, lowest.where(~is_last, -torch.inf)


def unit_of(temperature: torch.Tensor, top_p: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the buckets per unit of logits, ``[R]`` float32: a power of two, which rounds nothing.

    The buckets but the last reach `EXTENT` or `SPREAD` down, but with top-p not below the logit
    under which all V tokens together have less than the mass that top-p cuts.
    """
    tail = temperature.double() * (vocab_size / (1.0 - top_p.double())).log()
    extent = torch.minimum(EXTENT * temperature, tail.float()).clamp_max(SPREAD)
    extent = extent * (NUM_BUCKETS / (NUM_BUCKETS - 2))  # the first is not all below the largest
    # Bits 23 and up of a float32 are its exponent plus 127: this is 2^6 over it, without fraction;
    # 2^13 at most, so that numbers of buckets are exact.
    exponent = (extent.contiguous().view(torch.int32) >> 23).clamp_min(120)
    return ((260 - exponent) << 23).view(torch.float32)
