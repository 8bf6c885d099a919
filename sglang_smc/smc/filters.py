"""Find the tokens that top-k, top-p and min-p keep.

All three keep the first tokens of one order: by descending logit, ties by ascending id. So a few
numbers per row describe the kept set, and no row is sorted. A token's *key* is the distance of its
logit from the row's largest, in 2^15 steps that are fine enough for the distribution (`_rate`).
Tokens of one key count as equally likely, lowest id first. Larger distances have the last key.

The rules are those of SGLang's sampler: temperature first, then, on the same probabilities
("joint"), a rank below top_k, a mass of the preceding tokens of at most top_p, and a p of at least
min_p times the largest. Each is exact up to the order within the one key where the row is cut.
"""

from typing import NamedTuple

import torch

NUM_KEYS = 1 << 15
EXTENT = 31.0  # nats below the likeliest token; less likely tokens share the last key
_LEVELS = ((8, 128), (0, 256))  # per search level: bits of a key below a bucket, and buckets
_ENTRIES = 1 << 18  # logits that are processed at once, so that wide types stay in the cache
_MASS_UNIT = 2.0**-44  # of the likeliest token's mass: integer sums do not depend on the order


class KeptTokens(NamedTuple):
    """Tokens that filters keep, of R rows of logits."""

    peak: torch.Tensor  # [R] float32: the largest logit
    rate: torch.Tensor  # [R] float32: keys per unit of logits, a power of two
    lowest: torch.Tensor  # [R] float32: tokens of smaller logits are cut
    key: torch.Tensor  # [R] int32: tokens of smaller keys are kept; `NUM_KEYS` keeps all
    last: torch.Tensor  # [R] int32: of the tokens with this key, the last id that is kept

    def at(self, rows: torch.Tensor | None) -> "KeptTokens":
        """Return the kept tokens of each draw's row, ``[D]``; None is one draw per row."""
        return self if rows is None else KeptTokens._make(field[rows] for field in self)

    def dropped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return which logits ``[R, V]`` are cut, bool; NaN is never cut, so that it propagates."""
        key = _keys(logits.float(), self.peak, self.rate)
        cut = self.key.unsqueeze(1)
        token = torch.arange(logits.shape[1], device=logits.device)
        after = (key > cut) | ((key == cut) & (token > self.last.unsqueeze(1)))
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
    spread = peak - torch.where(exists, logits, torch.inf).amin(1)
    rate = _rate(spread, temperature, top_p, logits.shape[1])
    keys = _keys(logits, peak, rate)
    masses = ((logits - peak.unsqueeze(1)) / temperature.unsqueeze(1)).exp()
    of_tokens = torch.stack([exists.long(), (masses.double() / _MASS_UNIT).long()])
    key, num_left = _search(keys, of_tokens, top_k, top_p)
    running = ((keys == key) & exists).cumsum(1, dtype=torch.int32)  # [R, V]
    last = (running < num_left).sum(1)
    # inf - inf: in a row without a distribution the masses are NaN.
    filters = (top_k > 1) & ~masses.sum(1).isnan()
    is_cut = filters & ((exists.sum(1) >= top_k) | (top_p < 1))
    lowest = (peak + temperature.double() * min_p.double().log()).float()
    return KeptTokens(
        peak=peak,
        rate=rate,
        lowest=torch.where(filters & (min_p > 0), lowest, -torch.inf),
        key=torch.where(is_cut, key.squeeze(1), NUM_KEYS).int(),
        last=torch.where(is_cut, last, 0).int(),
    )


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


def _keys(logits: torch.Tensor, peak: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """Return the keys of logits, ``[R, V]`` int32; the key of a NaN is arbitrary."""
    steps = (peak.unsqueeze(1) - logits) * rate.unsqueeze(1)
    return steps.clamp(0, NUM_KEYS - 1).nan_to_num(0.0).int()


def _rate(
    spread: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return the keys per unit of logits, ``[R]`` float32: a power of two, which rounds nothing.

    The keys reach down to the smallest logit, at ``spread`` below the largest, but not below
    `EXTENT`, nor, with top-p, below the logit under which all V tokens together have less than the
    mass that top-p cuts.
    """
    tail = temperature.double() * (vocab_size / (1.0 - top_p.double())).log()
    extent = torch.minimum(EXTENT * temperature, tail.float()).minimum(spread)
    # Bits 23 and up of a float32 are its exponent plus 127: this is 2^14 over it, without fraction.
    exponent = (extent.contiguous().view(torch.int32) >> 23).clamp(14, 255)
    return ((268 - exponent) << 23).view(torch.float32)
