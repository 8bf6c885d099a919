"""Particles over a shared prefix, laid out at random slots of a KV cache, and what they see."""

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from sglang_smc.kernels.attention import work
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.models.chains import Chains, MergedRows
from sglang_smc.models.softmax import SharedPrefixPlan, Softmax, plan_shared_prefix
from sglang_smc.smc.ledger import AttentionContext, KVLocations

NUM_SLOTS = 1024
SCALING = 0.3
PLAIN = Softmax(SCALING)


def attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Softmax attention of one query in float64, one head at a time: ``[q_heads, width]``.

    Args:
        query: ``[q_heads, head_dim]``
        keys: that it sees, ``[number, kv_heads, head_dim]``; values likewise.
    """
    scaling, cap, sinks, value_scale = softmax
    group = len(query) // keys.shape[1]
    output = []
    for head, own in enumerate(query.double()):
        scores = keys[:, head // group].double() @ own * scaling
        if cap:
            scores = cap * torch.tanh(scores / cap)
        sink = 0 if sinks is None else sinks[head].double().exp()
        weights = value_scale * scores.exp() / (scores.exp().sum() + sink)
        output.append(weights @ values[:, head // group].double())
    return torch.stack(output)


class Case(NamedTuple):
    """G requests of N particles with C new tokens each; the cache holds all keys.

    What no query may look at is NaN: slots that nobody owns, slot 0, and those of positions without
    a key.
    """

    query: torch.Tensor  # [G, N, C, q_heads, head_dim]
    keys: torch.Tensor  # [NUM_SLOTS, kv_heads, head_dim]
    values: torch.Tensor
    req_to_token: torch.Tensor  # [rows, width] int32
    tails: torch.Tensor  # [rows, W] int32
    rows: torch.Tensor  # [G]
    committed: torch.Tensor  # [G]
    particle_rows: torch.Tensor  # [G, N]
    starts: torch.Tensor  # [G, N]
    present: torch.Tensor  # [G, N] bool; an absent particle's keys stand in slot 0
    open_columns: torch.Tensor  # [G] new tokens that a request has; the keys of others do, too
    max_tail: int
    softmax: Softmax = PLAIN
    window: int | None = None
    sees_block: bool = False
    first_key: int = 0
    sink: int = 0  # keys from the first on that a query sees beside its window
    rank: int | None = None  # of latents: keys, whose first numbers are the values

    def expected(self) -> torch.Tensor:
        """Softmax attention in float64, one query at a time; NaN where absent."""
        output = torch.full(self.query.shape, float("nan"), dtype=torch.float64)
        for g, n in self.present.nonzero().tolist():
            for c in range(min(int(self.open_columns[g]), self.query.shape[2])):
                slots = self.seen(g, n, c)
                keys = self.keys[slots]
                values = self.values[slots]
                output[g, n, c] = attend_by_hand(self.query[g, n, c], keys, values, self.softmax)
        return output

    def seen(self, g: int, n: int, c: int) -> torch.Tensor:
        """Slots of the keys that a query sees, in the order of their positions."""
        committed = int(self.committed[g])
        end = int(self.last_seen()[g, n, c]) + 1
        prefix = self.req_to_token[self.rows[g], :committed]
        place = torch.arange(committed, end) % self.tails.shape[1]
        tail = self.tails[self.particle_rows[g, n], place]
        own = int(self.starts[g, n]) + c
        first = 0 if self.window is None else own - self.window
        slots = torch.cat([prefix[:end], tail]).long()
        position = torch.arange(len(slots))
        is_seen = (position >= first) | (position < self.first_key + self.sink)
        return slots[is_seen & (position >= self.first_key)]

    def last_seen(self) -> torch.Tensor:
        """The position of the last key that each query sees, ``[G, N, C]``."""
        column = torch.arange(self.query.shape[2]).expand(self.query.shape[:3])
        if self.sees_block:
            column = (self.open_columns - 1).view(-1, 1, 1).expand_as(column)
        return self.starts.unsqueeze(2) + column

    def assert_close(self, output: torch.Tensor) -> None:
        """``output`` is the expected, for all particles that are present.

        What a query gets that sees no key has no meaning.
        """
        column = torch.arange(self.query.shape[2])
        asked = self.present.unsqueeze(2) & (column < self.open_columns.view(-1, 1, 1))
        asked = asked & (self.last_seen() >= self.first_key)
        # A GPU multiplies float32 in three parts, and adds in another order.
        tolerance = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[output.dtype]
        torch.testing.assert_close(
            output.cpu().double()[asked],
            self.expected()[..., : output.shape[4]][asked],
            atol=tolerance,
            rtol=tolerance,
        )


def make_case(
    committed: list[int],
    ahead: list[list[int | None]],
    *,
    num_columns: int,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    open_columns: list[int] | None = None,
    **layer: Any,
) -> Case:
    """Lay out requests of the given prefix lengths.

    Args:
        committed: ``[G]`` lengths of the prefixes.
        ahead: ``[G, N]`` how far each particle's first token stands behind ``committed``: -1 for
            the last committed token itself; None for an absent particle.
        open_columns: ``[G]`` how many of the columns each request has itself; None for all.
        layer: further fields of the case, from ``softmax`` on.
    """
    generator = torch.Generator().manual_seed(0)
    first_key = layer.get("first_key", 0)
    starts = torch.tensor([[a or 0 for a in row] for row in ahead])
    size, num_particles = starts.shape
    longest = int(starts.max()) + num_columns
    free = (torch.randperm(NUM_SLOTS - 1, generator=generator) + 1).tolist()

    filler = free.pop()  # where nothing stands
    table = torch.full((size + 1, max(committed)), filler, dtype=torch.int32)
    rows = torch.randperm(size + 1, generator=generator)[:size]
    num_rows = size * (num_particles + 1)
    width = 1 << longest.bit_length()
    tails = torch.full((num_rows, width), filler, dtype=torch.int32)
    others = torch.randperm(num_rows, generator=generator)[: size * num_particles]
    particle_rows = others.view(size, num_particles)
    for g, length in enumerate(committed):
        table[rows[g], :length] = torch.tensor([free.pop() for _ in range(length)])
        common = [free.pop() for _ in range(longest // 2)]  # of tails with one ancestor
        for row, distance in zip(particle_rows[g], ahead[g], strict=True):
            tail = [0] * num_columns
            if distance is not None:
                inherited = common[: max(distance, 0)]
                own = distance + num_columns - len(inherited)
                tail = inherited + [free.pop() for _ in range(own)]
            place = torch.arange(length, length + len(tail)) % width
            tails[row, place] = torch.tensor(tail, dtype=torch.int32)

    for g, columns in enumerate(open_columns or []):
        for row, start in zip(particle_rows[g], committed[g] + starts[g], strict=True):
            tails[row, torch.arange(int(start) + columns, int(start) + num_columns) % width] = 0

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    owned = torch.zeros(NUM_SLOTS, 1, 1, dtype=torch.bool)
    for slots in (table[rows], tails[others]):
        owned[slots.flatten().long()] = True
    owned[[0, filler]] = False
    for g, length in enumerate(committed):
        behind = torch.arange(length, max(length, first_key)) % width
        for keyless in (table[rows[g], :first_key], tails[particle_rows[g]][:, behind]):
            owned[keyless.flatten().long()] = False
    keys, values = (
        normal(NUM_SLOTS, kv_heads, head_dim).where(owned, float("nan")) for _ in range(2)
    )
    lengths = torch.tensor(committed)
    return Case(
        query=normal(size, num_particles, num_columns, q_heads, head_dim),
        keys=keys,
        values=keys if layer.get("rank") else values,
        req_to_token=table,
        tails=tails,
        rows=rows,
        committed=lengths,
        particle_rows=particle_rows,
        starts=lengths.unsqueeze(1) + starts,
        present=torch.tensor([[a is not None for a in row] for row in ahead]),
        open_columns=torch.tensor(open_columns or [num_columns] * size),
        max_tail=longest + 3,
        **layer,
    )


def context_of(case: Case) -> AttentionContext:
    locations = KVLocations(case.rows, case.committed, case.particle_rows, case.max_tail)
    sight = case.window, case.sees_block, case.first_key, case.sink
    return AttentionContext(case.req_to_token, case.tails, locations, case.starts, *sight)


def plan_of(case: Case, merged: MergedRows | None = None) -> SharedPrefixPlan:
    """The plan of the torch reference."""
    return plan_shared_prefix(
        context_of(case),
        num_columns=case.query.shape[2],
        group=case.query.shape[3] // case.keys.shape[1],
        dtype=case.query.dtype,
        cache=case.keys,
        merged=merged,
    )


def runner_of(
    table: torch.Tensor,
    pool: Any,
    dtype: torch.dtype,
    heads: tuple[int, int],
    *,
    context_len: int = 256,
    latents: tuple[int, int] | None = None,
) -> Any:
    """What attention asks of SGLang's model runner.

    Args:
        heads: of queries, and of keys.
        latents: the widths of values and rotary parts, where attention is latent.
    """
    rank, rope = latents or (None, 0)
    return SimpleNamespace(
        use_mla_backend=rank is not None,
        is_hybrid_swa=False,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
        dtype=dtype,
        spec_algorithm=None,
        lora_manager=None,
        model_config=SimpleNamespace(
            context_len=context_len,
            model_is_mrope=False,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            get_num_attention_heads=lambda tp_size: heads[0],
            get_num_kv_heads=lambda tp_size: heads[1],
        ),
    )


def backend_of(
    case: Case, implementation: Any, pool: dict[str, Any], **needs: Any
) -> ParticleAttention:
    """The backend of a model with a case's keys, as it begins a pass; ``pool`` reads and writes."""
    heads, width = case.query.shape[3:]
    kv_pool = SimpleNamespace(dtype=case.keys.dtype, start_layer=0, layer_num=1, **pool)
    latents = None if case.rank is None else (case.rank, width - case.rank)
    of_model = heads, case.keys.shape[1]
    runner = runner_of(case.req_to_token, kv_pool, case.query.dtype, of_model, latents=latents)
    backend = ParticleAttention(runner, case.tails, implementation, **needs)
    tokens = case.query[..., 0, 0].long()
    backend.plan(Chains(tokens, case.starts, tokens, context_of(case).locations))
    return backend


def one_multiprocessor() -> Any:
    """Let the device have one, so that it has rows: programs walk the tails of theirs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chip = work.chip_of(device)._replace(multiprocessors=1)
    return mock.patch.object(work, "chip_of", lambda _: chip)
