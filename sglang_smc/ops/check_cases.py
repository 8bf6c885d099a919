"""Define small inputs on which each kernel of a round is checked against its torch reference.

A check runs its operation with one implementation of `Ops`, on inputs that are the same each time.
Every field of `Ops` is checked; checks of `kind` are of the models' kernels. Inputs have the sizes
and kinds of a server's rounds, so that what is compiled here is what rounds run.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from sglang_smc.models.gated_delta import RecurrenceInputs, gated_delta
from sglang_smc.models.softmax import Heads, Softmax, plan_shared_prefix, shared_prefix_attention
from sglang_smc.smc import fidelity, filters, verification, weighing
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import EditColumns, Edits
from sglang_smc.smc.ledger import Arenas, AttentionContext, KVLocations, Wanted
from sglang_smc.smc.ops import MOST_SKINNY_ROWS, Fused, Ops
from sglang_smc.smc.population import Population
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.weighing import SCHEMES, Block

NUM_GROUPS = 3
LIKELY = 1000  # tokens that have nearly all of a row's mass
PREFIX = 80  # a multiple of 16, as of a server's rows


class Passes(NamedTuple):
    """Say how a model's attention runs in rounds."""

    heads: Heads
    columns: tuple[int, ...]  # tokens of a particle in a pass
    rotates: bool = False  # it rotates queries and keys, and writes keys and values


class CheckSizes(NamedTuple):
    """Sizes of a server's rounds."""

    num_particles: int = 8
    num_steps: int = 8
    passes: tuple[Passes, ...] = ()  # of its models
    gated_delta: bool = False  # whether some layers have linear attention (gated delta rule)
    draft_layers: bool = True  # whether the draft's run as kernels
    vocab_size: int = LIKELY


class Inputs:
    """Random inputs with a fixed seed, in the sizes of the server's rounds."""

    def __init__(self, device: str, sizes: CheckSizes, seed: int = 0) -> None:
        self.device = device
        self.sizes = sizes
        self.shape = NUM_GROUPS, sizes.num_particles, sizes.num_steps
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def num_columns(self) -> int:
        """Return the drafted columns where each has logits: no kernel is compiled by their number.

        So few that inputs are small beside a round's.
        """
        return min(self.sizes.num_steps, 2 if self.sizes.num_particles <= 16 else 1)

    @property
    def likely(self) -> torch.Tensor:
        """Return the likely tokens, spread over the vocabulary."""
        count = min(LIKELY, self.sizes.vocab_size)
        apart = self.sizes.vocab_size // count
        place = torch.arange(count, device=self.device)
        return place * apart + place % apart

    @property
    def multiprocessors(self) -> int:
        """Return those of the device, 1 on a CPU."""
        is_gpu = torch.device(self.device).type == "cuda"
        return torch.cuda.get_device_properties(self.device).multi_processor_count if is_gpu else 1

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return integers in ``low .. high - 1``, int64."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def seeds(self) -> torch.Tensor:
        return self.whole(-(1 << 62), 1 << 62, NUM_GROUPS)

    def uniforms(self, *shape: int) -> torch.Tensor:
        """Return uniforms in [0, 1), float64."""
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def flags(self, share: float, *shape: int) -> torch.Tensor:
        return self.uniforms(*shape) < share

    def numbers(self, *values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return ``[R, V]``: few tokens are likely, so that few uniforms are near a boundary."""
        token = torch.arange(self.sizes.vocab_size, device=self.device)
        rows = (-20.0 - token % 11).repeat(num_rows, 1)
        rows[:, self.likely] = 3 * self.normal(num_rows, len(self.likely))
        return rows

    def tokens(self, *shape: int) -> torch.Tensor:
        return self.whole(0, self.sizes.vocab_size, *shape)

    def none_greedy(self) -> torch.Tensor:
        """Return that no group is, as rounds say where none is."""
        return torch.zeros(NUM_GROUPS, dtype=torch.bool, device=self.device)

    def present(self) -> torch.Tensor:
        """Return present particles ``[G, N]`` bool, at least the first of each group."""
        size, num_particles, _ = self.shape
        return torch.arange(num_particles, device=self.device) < self.whole(
            1, num_particles + 1, size, 1
        )


class Check(NamedTuple):
    """Check of one operation."""

    field: str  # of `Ops`: replaced by the reference if the check fails
    play: Callable[[Ops, Inputs], Any]  # returns a tensor, or nested tuples of tensors


def _texts(of: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tails of two kinds of tokens ``[G, N, J]``, and their lengths ``[G, N]``."""
    size, num_particles, num_steps = of.shape
    width = 2 * num_steps + 3
    texts = of.flags(0.2, size, num_particles, width).long()
    texts[:, 1::2] = texts[:, ::2][:, : texts[:, 1::2].shape[1]]  # some are alike
    texts = functional.pad(texts, (1, 0))[:, :, 1:]  # behind another token, as in a population
    return texts, of.whole(0, 2, size, num_particles) + width - 2


def _stratify(ops: Ops, of: Inputs) -> Any:
    family, tokens = (of.whole(0, 2, *of.shape[:2]) for _ in range(2))
    same = family.unsqueeze(2) == family.unsqueeze(1)
    return ops.stratify(of.uniforms(*of.shape[:2]), same, tokens)


def _columns(of: Inputs) -> EditColumns:
    return EditColumns(
        penalizes=torch.tensor([False, True, True, False], device=of.device),
        biases=torch.tensor([False, True, False, False], device=of.device),
        rates=torch.tensor([[0.2, 0.3, 1.1]] * (NUM_GROUPS + 1), device=of.device),
        counts=of.flags(0.05, NUM_GROUPS + 1, of.sizes.vocab_size).int(),
        bias=of.normal(NUM_GROUPS + 1, of.sizes.vocab_size),
    )


def _edit_logits(ops: Ops, of: Inputs) -> Any:
    size, num_particles, _ = of.shape
    shape = size, num_particles, of.num_columns + 1
    edits = Edits(
        columns=_columns(of),
        groups=range(size),
        rows=torch.arange(1, size + 1, device=of.device),
        min_new_tokens=of.whole(0, 20, size),
        stop_mask=of.flags(0.01, size, of.sizes.vocab_size),
        starts=of.whole(0, 20, size, num_particles),
        texts=of.tokens(size, num_particles, 13)[:, :, 1:],  # behind the first, as in a population
        lengths=of.whole(0, 13, size, num_particles),
    )
    logits = of.logits(math.prod(shape)).view(*shape, -1)
    ops.edit_logits(logits, edits, of.tokens(size, num_particles, of.num_columns), 0)
    return logits


def _count_tokens(ops: Ops, of: Inputs) -> Any:
    columns = _columns(of)
    rows = torch.arange(1, NUM_GROUPS + 1, device=of.device)
    tokens = of.whole(0, 9, NUM_GROUPS, 13)[:, 1:]  # behind the first, as in a population
    lengths = of.whole(-1, 13, NUM_GROUPS)
    ops.count_tokens(columns, rows, tokens, lengths)
    return columns.counts


def _law(ops: Ops, of: Inputs) -> TokenDistribution:
    """Return the distributions of some groups, one of them greedy, with filters by torch."""
    logits = of.logits(NUM_GROUPS * of.shape[1])
    temperature = (of.uniforms(NUM_GROUPS) + 0.5).float()
    kept = filters.keep_tokens(logits, temperature, *_filters(of))
    greedy = torch.arange(NUM_GROUPS, device=of.device) == 2
    return ops.distribution(logits, temperature, greedy=greedy, kept=kept)


def _filters(of: Inputs) -> tuple[torch.Tensor, ...]:
    every = of.sizes.vocab_size
    rules = [50, every, every], [1.0, 0.8, 1.0], [0.0, 0.0, 0.05]
    return tuple(torch.tensor(rule, device=of.device) for rule in rules)


def _filtered(ops: Ops, of: Inputs) -> Any:
    law = _law(ops, of)._replace(greedy=of.none_greedy(), kept=None).filtered(*_filters(of))
    assert law.kept is not None
    return law.kept.dropped(law.scores), law.log_sums()


def _sample_and_score(ops: Ops, of: Inputs) -> Any:
    law = _law(ops, of)
    uniforms = of.uniforms(law.num_draws)
    return law.sample(uniforms), law._replace(kept=None).sample(uniforms)


def _score_tokens(ops: Ops, of: Inputs) -> Any:
    law = _law(ops, of)
    likeliest = law.scores.argmax(1)
    plain = law._replace(greedy=of.none_greedy(), kept=None)
    tokens = of.tokens(law.num_draws)
    return plain.score(tokens), law.score(likeliest), law.summed().score(likeliest)


def _log_probs(ops: Ops, of: Inputs) -> Any:
    return _law(ops, of)._replace(greedy=None, kept=None).log_probs()


def _block(of: Inputs) -> tuple[Block, torch.Tensor]:
    """Return a block of drafts, and which tokens end a sequence."""
    log_q = of.normal(*of.shape) - 2
    ends = of.flags(0.1, *of.shape)
    present = of.present()
    num_steps = of.whole(1, of.shape[2] + 1, NUM_GROUPS)
    within = torch.arange(of.shape[2], device=of.device) < num_steps.view(-1, 1, 1)
    up_to_end = (ends.cumsum(2) == ends) & within & present.unsqueeze(2)
    log_p = log_q + 0.3 * of.normal(*of.shape)
    group = torch.arange(NUM_GROUPS, device=of.device)
    log_weights = of.normal(*of.shape[:2]).double().masked_fill(~present, -torch.inf)
    block = Block(
        log_weights=log_weights,
        log_p=log_p,
        log_q=log_q,
        up_to_end=up_to_end,
        present=present,
        power=of.numbers(1.0, 1.0, 2.0),
        num_steps=num_steps,
        ess_threshold=of.numbers(0.5, 1.1, 0.9),
        resample_each_token=group == 2,
        evidence_threshold=of.numbers(0.5, 0.0, 0.0),
        scheme=group % len(SCHEMES),
        keep_uniforms=of.uniforms(NUM_GROUPS),
        uniforms=of.uniforms(*of.shape[:2]),
    )
    return block, ends


def _reweight_and_resample(ops: Ops, of: Inputs) -> Any:
    block, _ = _block(of)
    return ops.reweight_and_resample(block)


def _resample_by_weights(ops: Ops, of: Inputs) -> Any:
    block, _ = _block(of)
    return ops.resample_by_weights(
        log_weights=block.log_weights,
        gains=of.normal(*of.shape[:2]).double(),
        present=block.present,
        ess_threshold=block.ess_threshold,
        uniforms=block.uniforms,
        scheme=block.scheme,
    )


def _keep(ops: Ops, of: Inputs) -> Any:
    block, ends = _block(of)
    winner = of.whole(0, of.shape[1], NUM_GROUPS)
    none = torch.zeros_like(block.num_steps)
    residuals = block.log_p.new_zeros(NUM_GROUPS, 1)
    rejects = of.flags(0.5, NUM_GROUPS)
    verified = verification.Verified(block.num_steps // 2, winner, rejects, none, residuals)
    block = block._replace(evidence_threshold=of.numbers(0.5, 0.0, torch.inf))
    return ops.keep(verified, block, ends)


def _population(ops: Ops, of: Inputs) -> Any:
    """Take particles through a round: from a table, on, to ancestors, and back."""
    size, num_particles, num_steps = of.shape
    present = of.present()
    texts, lengths = _texts(of)
    log_weights = of.normal(size, num_particles).double()
    table = ops.population(
        texts=functional.pad(texts, (1, 1)),
        lengths=lengths.clamp_max(num_steps + 1) * present,
        ended=of.flags(0.3, size, num_particles) | ~present,
        log_weights=log_weights.masked_fill(~present, -torch.inf),
        num_emitted=of.whole(0, 20, size),
        log_evidence=of.uniforms(size),
        present=present,
        roots=of.whole(0, num_particles, size, num_particles),
        unread=of.flags(0.5, size),
        fidelity=of.uniforms(size, num_particles, 4),
    )
    rows = torch.arange(size, device=of.device).flip(0)
    begun, *more = table.gather(rows, num_particles, table.texts.shape[2])
    block, ends = _block(of)
    decision = weighing.reweight_and_resample(block._replace(present=begun.present))
    extended = begun.extend(of.whole(0, 2, *of.shape), ends, decision)
    failure = of.flags(0.3, size).long()
    bonus = of.whole(0, 2, size, num_particles)
    end = of.flags(0.3, size, num_particles)
    continued = extended.append_bonus(bonus, end, failure)
    lag = of.whole(1, 4, size)
    flags = (of.flags(0.7, size), of.flags(0.3, size))
    narrowed = continued.narrow(of.seeds(), lag, *flags)
    last = narrowed.population.store(table, rows, narrowed.num_common)
    beside = narrowed._asdict()
    each = [begun, extended, continued, beside.pop("population"), table]
    return more, list(map(_population_columns, each)), beside, last


def _population_columns(population: Population) -> dict[str, torch.Tensor]:
    """Return what is defined of the columns that kernels write."""
    found = population._asdict()
    found["texts"] = population.texts[:, :, :-1]  # the last place is never part of a tail
    for carried in ("logprobs", "scores"):
        del found[carried]
    return found


def _tally(ops: Ops, of: Inputs) -> Any:
    totals = of.uniforms(6, 5)
    rows = torch.tensor([4, 1, 2], device=of.device)
    flags = of.flags(0.5, NUM_GROUPS)
    lowest = of.uniforms(NUM_GROUPS)
    added = [flags, of.whole(0, 9, NUM_GROUPS), of.uniforms(NUM_GROUPS)]
    return ops.tally(totals, rows, added=added, lowest=lowest, latest=[flags]), totals


def _verify(ops: Ops, of: Inputs) -> Any:
    size, num_chains, _ = of.shape
    num_steps = of.num_columns
    rows = size * num_chains
    p = of.logits(rows * (num_steps + 1)).log_softmax(1)
    q = p.view(rows, num_steps + 1, -1)[:, :-1].clone()
    q[:, :, of.likely] += 0.3 * of.normal(rows, num_steps, len(of.likely))
    q = q.log_softmax(2)
    drawn = (q.double().exp().cumsum(2) < of.uniforms(rows, num_steps, 1)).sum(2)
    tokens = drawn.clamp_max(q.shape[2] - 1).view(size, num_chains, num_steps)
    lengths = of.whole(0, num_steps + 1, size, num_chains)
    laws = [_cut(ops, of, one.contiguous()) for one in (p, *q.unbind(1))]
    uniforms = of.uniforms(size, num_chains)[:, 0]
    found = ops.verify(tokens, lengths, laws[0], laws[1:], uniforms)
    left = found.residuals[found.left].where(found.rejects.unsqueeze(1), 0.0)
    return found.num_columns, found.winner, found.rejects, left


def _cut(ops: Ops, of: Inputs, log_p: torch.Tensor) -> TokenDistribution:
    """Return distributions of which filters cut next to nothing, found by torch."""
    ones = torch.ones(NUM_GROUPS, device=of.device)
    kept = filters.keep_tokens(log_p, ones, ones.long() * of.sizes.vocab_size, ones, ones * 1e-9)
    return _added_up(ops, of, log_p, ones, kept)


def _added_up(
    ops: Ops,
    of: Inputs,
    scores: torch.Tensor,
    temperature: torch.Tensor,
    kept: filters.KeptTokens | None = None,
) -> TokenDistribution:
    """Return distributions with sums as rounds have them, and no other method of ``ops``."""
    law = ops.distribution(scores, temperature, greedy=of.none_greedy(), kept=kept)
    return TokenDistribution._make(law.summed())


def _keep_column(ops: Ops, of: Inputs) -> Any:
    coins = of.uniforms(NUM_GROUPS)
    num_steps = of.whole(1, of.num_columns + 1, NUM_GROUPS)
    scores = [of.logits(NUM_GROUPS * of.shape[1]) for _ in range(of.num_columns)]
    return ops.keep_column(list(map(TokenDistribution.of_log_probs, scores)), coins, num_steps)


def _watch(ops: Ops, of: Inputs) -> Any:
    size, num_particles, _ = of.shape
    num_steps = of.num_columns
    starts = of.whole(0, num_steps, size, num_particles)
    lengths = starts + of.whole(0, num_steps + 2, size, num_particles)
    tails = of.tokens(size, num_particles, 2 * num_steps + 4)
    ancestors = of.whole(0, num_particles, size, num_particles)
    temperature = torch.ones(size, device=of.device)
    scores = of.logits(size * num_particles * (num_steps + 1))
    p = _added_up(ops, of, scores, temperature)
    q = _added_up(ops, of, of.logits(size * num_particles), temperature)
    measured = torch.arange(size, device=of.device) < 2
    path = fidelity.Path(
        coins=of.uniforms(size),
        num_steps=of.whole(1, num_steps + 1, size),
        measured=measured,
        ancestors=ancestors,
        starts=starts,
        lengths=lengths,
        tails=tails,
    )
    return ops.watch(of.uniforms(size, num_particles, 4), path, p, q)


def _ledger(ops: Ops, of: Inputs) -> Any:
    """Run a round's operations: reserve slots, copy tails to descendants, commit some tokens."""
    size, num_particles, num_steps = of.shape
    columns = num_steps + 1
    text = 20
    arena = num_particles * columns
    width = 1 << (2 * columns).bit_length()
    table = torch.arange((size + 1) * (text + arena), device=of.device).view(size + 1, -1).int()
    tails = torch.zeros((size + 1) * num_particles, width, dtype=torch.int32, device=of.device)
    sizes = {"num_particles": num_particles, "max_tail": columns, "num_slots": table.numel()}
    ledger = ops.ledger(table, tails, **sizes)
    rows = torch.arange(1, size + 1, device=of.device)
    committed = torch.full((size,), text, device=of.device)
    arenas = Arenas(rows, committed, committed + arena)
    wanted = Wanted(
        rows=rows,
        committed=committed,
        allocated=arenas.allocated,
        lengths=torch.zeros(size, num_particles, dtype=torch.int64, device=of.device),
        idle=of.flags(0.1, size, num_particles),
        unread=of.flags(0.5, size),
        num_particles=torch.full_like(committed, num_particles),
        num_steps=torch.full_like(committed, num_steps),
    )
    reserved = ledger.reserve(wanted, columns)
    ancestors = of.whole(0, num_particles, size, num_particles)
    ledger.descend(rows, committed=committed, ancestors=ancestors, max_tail=columns)
    lengths = of.whole(1, columns + 1, size, num_particles)
    counts = of.whole(0, 2, size)
    room: dict[str, Any] = {"max_tail": columns, "max_arena": arena}
    ledger.commit(arenas, lengths, counts, **room)
    return reserved, table, tails, ledger.rank[1:]  # slot 0 receives the writes of masked entries


def _skinny(ops: Ops, of: Inputs) -> Any:
    """Run the products of a draft's layer, where it is fused, by tiles of few and of most rows."""
    if not of.sizes.draft_layers:
        return ()
    most = MOST_SKINNY_ROWS
    return [_products(ops, of, rows) for rows in (min(of.shape[1], most), most // 2 + 1, most)]


def _products(ops: Ops, of: Inputs, rows: int) -> Any:
    """Multiply rows as attention, a head, and the MLP do."""
    halves = (one.heads.dtype for one in of.sizes.passes if one.heads.dtype.itemsize == 2)
    dtype = next(halves, torch.float16)
    hidden = 256
    normal = partial(of.normal, dtype=dtype)

    def product(outputs: int, inputs: int, **around: Any) -> torch.Tensor:
        x = normal(rows, hidden if "beside" in around else inputs)
        weight = (of.normal(outputs, inputs) / inputs**0.5).to(dtype)
        return ops.skinny(x, weight, Fused(eps=1e-5, **around))

    small = of.whole(-127, 128, 64, hidden).to(torch.int8)
    scale = of.uniforms(64).float() / 1024
    of_int8 = Fused(scale=scale, gated=True), Fused(scale=scale, dtype=torch.float32)
    norm = normal(hidden)
    beside = {"beside": normal(rows, hidden), "beside_norm": normal(hidden)}
    return [
        product(64, hidden, norm=norm, bias=normal(64)),
        product(64, 2 * hidden, norm=norm, **beside),
        product(64, hidden, residual=normal(rows, 64)),
        product(128, hidden, norm=norm, gated=True),
        product(64, 5120, residual=normal(rows, 64)),
        *(ops.skinny(normal(rows, hidden), small, one) for one in of_int8),
    ]


def _attention(ops: Ops, of: Inputs, *, latent: bool) -> list[torch.Tensor]:
    """Attend in each model's passes with heads of a kind.

    For few requests, and for as many as have a program on each multiprocessor.
    """
    models = [one for one in of.sizes.passes if bool(one.heads.rank) == latent]
    passes = [(one.heads, columns, one.rotates) for one in models for columns in one.columns]
    programs = {1, of.multiprocessors}
    return [_attend(ops, of, *one) for one in product(dict.fromkeys(passes), programs)]


def _attend(ops: Ops, of: Inputs, one: tuple[Heads, int, bool], programs: int) -> Any:
    heads, num_columns, rotates = one
    copies = math.ceil(programs / (of.shape[0] * heads.kv_heads))
    context = _context(of, copies, num_columns)
    starts = context.starts
    num_slots = context.req_to_token.numel() + context.tails.numel()
    shape = *starts.shape, num_columns, heads.q_heads, heads.head_dim
    of_cache = num_slots + 1, heads.kv_heads, heads.head_dim
    query, keys, values = (of.normal(*s, dtype=heads.dtype) for s in (shape, of_cache, of_cache))
    run = _attend_by_kernel if ops.kind == "triton" else _attend_by_torch
    if not rotates:
        return run((query, keys, values), heads, context)
    # Those in prefixes are written already.
    position = starts.unsqueeze(2) + torch.arange(num_columns, device=of.device)
    in_ring = position % context.tails.shape[1]
    slots = context.tails[context.locations.particle_rows.unsqueeze(2), in_ring].long()
    slots = slots.where(position >= context.locations.committed.view(-1, 1, 1), 0).flatten()
    of_new = len(slots), heads.kv_heads, heads.head_dim
    new = [of.normal(*of_new, dtype=heads.dtype) for _ in range(2)]
    angles = 6 * of.uniforms(PREFIX + num_columns + 3, heads.head_dim // 2).float()
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    output = run((query, keys, values), heads, context, (*new, slots, position, cos_sin))
    return output, keys[1:], values[1:]  # slot 0 receives the writes of the others


def _context(of: Inputs, copies: int, num_columns: int) -> AttentionContext:
    """Return prefixes of three lengths, ``copies`` of each, and tails of up to 4 tokens."""
    size = of.shape[0] * copies
    num_particles = of.shape[1]
    width = max(16, 1 << (num_columns + 4).bit_length())
    num_slots = size * (PREFIX + num_particles * width)
    slots = 1 + torch.randperm(num_slots, generator=torch.Generator().manual_seed(0)).int()
    table, tails = slots.to(of.device).tensor_split([size * PREFIX])
    committed = torch.tensor([PREFIX, 3, 33], device=of.device).repeat(copies)
    particle_rows = torch.arange(size * num_particles, device=of.device).view(size, -1)
    rows = torch.arange(size, device=of.device)
    locations = KVLocations(rows, committed, particle_rows, max_tail=num_columns + 4)
    starts = committed.unsqueeze(1) + of.whole(-1, 4, size, num_particles)
    return AttentionContext(table.view(size, PREFIX), tails.view(-1, width), locations, starts)


_Tensors = tuple[torch.Tensor, ...]


def _attend_by_kernel(
    qkv: _Tensors, heads: Heads, context: AttentionContext, new: _Tensors = ()
) -> torch.Tensor:
    from sglang_smc.kernels.attention import latent
    from sglang_smc.kernels.attention.particle_attention import (
        New,
        new_arrivals,
        particle_attention,
    )

    query, keys, values = qkv
    sizes: dict[str, Any] = {"max_prefix": PREFIX, "scaling": heads.head_dim**-0.5}
    if heads.rank:
        return latent.latent_attention(query, keys, context, rank=heads.rank, **sizes)
    sizes["arrivals"] = new_arrivals(len(query), heads.kv_heads, query.device)
    if new:
        sizes["new"] = New.of(*new)
    return particle_attention(query, keys, values, context, **sizes)


def _attend_by_torch(
    qkv: _Tensors, heads: Heads, context: AttentionContext, new: _Tensors = ()
) -> torch.Tensor:
    query, keys, values = qkv
    if new:
        key, value, slots, position, cos_sin = new
        turn = cos_sin[position.flatten()]
        query = _rotated(query.flatten(0, 2), turn).view(query.shape)
        keys[slots] = _rotated(key, turn)
        values[slots] = value
    plan = plan_shared_prefix(
        context,
        num_columns=query.shape[2],
        group=heads.q_heads // heads.kv_heads,
        dtype=heads.dtype,
        cache=keys,
    )
    softmax = Softmax(heads.head_dim**-0.5)
    if heads.rank:
        return shared_prefix_attention(query, keys, None, plan, softmax)[..., : heads.rank]
    return shared_prefix_attention(query, keys, values, plan, softmax)


def _rotated(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[R, heads, head_dim]`` by cosines and sines ``[R, head_dim]``, NeoX style."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=2)
    first, second = heads.float().chunk(2, dim=2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    return turned.to(heads.dtype)


def _gated_delta(ops: Ops, of: Inputs) -> Any:
    """Update states of 4 value heads and 2 key heads, where a model has such layers."""
    if not of.sizes.gated_delta:
        return ()

    def columns(num_columns: int) -> RecurrenceInputs:
        gates = (-of.uniforms(5, num_columns, 4).float(), of.uniforms(5, num_columns, 4).float())
        return RecurrenceInputs(of.normal(5, num_columns, 8 * 64), *gates)

    states = of.normal(7, 4, 64, 64)
    source = of.whole(0, 7, 5)
    num_past = of.whole(0, 4, 5)
    past = columns(3)
    new = columns(of.shape[2] + 1)
    if ops.kind == "triton":
        from sglang_smc.kernels.attention import gated_delta as kernel

        return kernel.gated_delta(states, source, past, num_past, new)
    return gated_delta(states, source, past, num_past, new)


CHECKS = {
    "uniforms": Check(
        "uniforms",
        lambda ops, of: ops.uniforms(of.seeds(), of.whole(0, 4000, *of.shape), Purpose.DRAFT),
    ),
    "round_seeds": Check(
        "round_seeds", lambda ops, of: ops.round_seeds(of.seeds(), of.whole(0, 4000, NUM_GROUPS))
    ),
    "same_text": Check(
        "same_text", lambda ops, of: ops.same_text(*_texts(of), of.flags(0.9, *of.shape[:2]))
    ),
    "stratify": Check("stratify", _stratify),
    "edit_logits": Check("edit_logits", _edit_logits),
    "count_tokens": Check("count_tokens", _count_tokens),
    "filtered": Check("distribution", _filtered),
    "sample_and_score": Check("distribution", _sample_and_score),
    "score_tokens": Check("distribution", _score_tokens),
    "log_probs": Check("distribution", _log_probs),
    "log_sums": Check("distribution", lambda ops, of: _law(ops, of).log_sums()),
    "reweight_and_resample": Check("reweight_and_resample", _reweight_and_resample),
    "resample_by_weights": Check("resample_by_weights", _resample_by_weights),
    "population": Check("population", _population),
    "tally": Check("tally", _tally),
    "verify": Check("verify", _verify),
    "keep": Check("keep", _keep),
    "keep_column": Check("keep_column", _keep_column),
    "watch": Check("watch", _watch),
    "ledger": Check("ledger", _ledger),
    "skinny": Check("skinny", _skinny),
    "particle_attention": Check("kind", partial(_attention, latent=False)),
    "latent_attention": Check("kind", partial(_attention, latent=True)),
    "gated_delta": Check("kind", _gated_delta),
}
"""Checks by the operation's name, which is that of its field of `Ops` where it has one."""
ATTENTION = ("particle_attention", "latent_attention")
"""Checks that run each pass of each model on its own."""
