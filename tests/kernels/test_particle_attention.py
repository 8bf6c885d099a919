"""Triton kernels and their torch references, against softmax attention one query at a time."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.runtime.interpreter as interpreter
from compile_sizes import CHIPS
from fake_cuda import Account
from particle_cases import (
    SCALING,
    Case,
    backend_of,
    context_of,
    make_case,
    one_multiprocessor,
    plan_of,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.ministral3 import Ministral3Attention

from sglang_smc.kernels.attention import latent, spans, work
from sglang_smc.kernels.attention import particle_attention as plain
from sglang_smc.kv.transfer import each_tensor
from sglang_smc.models import softmax
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.models.rotary import LateRotary, leave_rotations
from sglang_smc.models.softmax import Softmax, shared_prefix_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16

pytestmark = pytest.mark.usefixtures("unwritten_is_nan", "one_rank")


def latents(heads: int, rank: int, rope: int, **more: Any) -> dict[str, Any]:
    """The shape of latent attention; compiled kernels of it take no float32."""
    dtype = torch.float32 if DEVICE == "cpu" else HALF
    width = {"q_heads": heads, "kv_heads": 1, "head_dim": rank + rope}
    return {**width, "rank": rank, "dtype": dtype, **more}


TWO = [70, 3], [[-1, 4], [7, None]]
LONG_TAILS = [5], [[300, 10, 513]]
NO_TAIL = [64, 10], [[-1, -1], [-1, None]]
DECODE = [70, 3, 200], [[0, 4], [7, 2], [0, 0]]
CATCH_UP = [70, 3], [[-1, 4, -1], [-1, 9, None]]
VERIFY = [1, 129], [[-1, 5], [None, 30]]
NO_FIRST = [1, 70, 1], [[0, 4], [-1, 2], [None, -1]]
UNLIKE = [40, 3], [[2, 0], [-1, 5]]
CAP = Softmax(SCALING, cap=1.5)
SINKS = Softmax(SCALING, sinks=torch.linspace(-1, 3, 4))
BOTH = CAP._replace(sinks=torch.linspace(-1, 3, 6))
BLOCKS: dict[str, Any] = {"sees_block": True}
FIRST_KEYS = {"window": 0, "sink": 2, "first_key": 1}

# Lengths of prefixes, tails, columns, and the shape of the layer.
CASES: dict[str, tuple[list[int], list[list[int | None]], int, dict[str, Any]]] = {
    "decode": (*DECODE, 1, {}),
    "catch up": (*CATCH_UP, 2, {}),
    "verify": (*VERIFY, 9, {}),
    "no tail at all": (*NO_TAIL, 1, {}),
    "unread": ([70, 3, 12], [[-1, -1], [-1, None], [2, 5]], 2, {}),
    "unread, in a window": ([70, 3], [[-1, -1], [-1, None]], 2, {"window": 30, "first_key": 1}),
    "of unlike columns": (*UNLIKE, 5, {"open_columns": [2, 4]}),
    "one particle": ([33], [[2]], 9, {}),
    "a tail of two spans": (*LONG_TAILS, 2, {}),
    "head by head": ([20], [[1, 2]], 2, {"q_heads": 3, "kv_heads": 3}),
    "eight to one": ([90], [[1, -1]], 9, {"q_heads": 8, "kv_heads": 1, "head_dim": 128}),
    "seven to one": ([90, 8], [[1], [2]], 5, {"q_heads": 14, "kv_heads": 2, "head_dim": 96}),
    "a window": ([70, 3, 200], [[-1, 40], [7, None], [0, 2]], 5, {"window": 30}),
    "a window within a tail": ([70, 3], [[20, 4], [7, 2]], 9, {"window": 4}),
    "a window beyond the text": ([70, 3], [[20, 4], [7, 2]], 2, {"window": 500}),
    "a cap": (*TWO, 5, {"softmax": CAP}),
    "no key at the first": (*NO_FIRST, 2, {"first_key": 1}),
    "no key at the first, in a window": (*NO_FIRST, 5, {"first_key": 1, "window": 20}),
    "no key in a prefix": ([3, 1, 70], [[4, 0], [-1, 9], [0, 0]], 5, {"first_key": 5}),
    "queries before the first key": ([1, 1], [[-1, -1], [-1, 0]], 3, {"first_key": 1}),
    "first keys beside a window": (*DECODE, 1, {"window": 20, "sink": 4}),
    "first keys beside a window in verification": (*VERIFY, 9, {"window": 15, "sink": 4}),
    "first keys beside one key": ([70, 3, 12], [[-1, 3], [-1, None], [2, 5]], 3, FIRST_KEYS),
    "first keys in a tail": ([2, 1, 7], [[30, 4], [9, 0], [2, 1]], 5, {"window": 3, "sink": 6}),
    "more first keys than a block": ([300], [[3, 20]], 2, {"window": 30, "sink": 100}),
    "first keys of a head": (*NO_FIRST, 5, {"first_key": 1, "window": 6, "sink": 4}),
    "blocks": ([70, 3, 1], [[-1, 4], [7, None], [0, 30]], 9, BLOCKS),
    "blocks of one": (*TWO, 1, BLOCKS),
    "blocks of unlike columns": (*UNLIKE, 5, BLOCKS | {"open_columns": [2, 4]}),
    "blocks over two spans": ([5], [[505, 10, 300]], 9, BLOCKS),
    "blocks without a first key": (*NO_FIRST, 9, BLOCKS | {"first_key": 1, "q_heads": 8}),
    "blocks with a cap": (*TWO, 5, BLOCKS | {"q_heads": 6, "kv_heads": 1, "softmax": BOTH}),
    "blocks in a window": (*VERIFY, 9, BLOCKS | {"window": 20}),
    "blocks in a window, with first keys": (*VERIFY, 9, BLOCKS | {"window": 20, "sink": 4}),
    "blocks of unlike columns in a window": (
        *UNLIKE,
        5,
        BLOCKS | {"open_columns": [2, 4], "window": 5},
    ),
    "sinks": (*TWO, 5, {"softmax": SINKS, "window": 30}),
    "scaled values": ([70], [[-1, 4]], 2, {"softmax": Softmax(SCALING, value_scale=0.5)}),
    "wide heads": (*TWO, 5, {"head_dim": 256, "window": 20, "softmax": Softmax(0.05, cap=50.0)}),
    "bfloat16": (*TWO, 5, {"dtype": torch.bfloat16}),
    "float16": (*TWO, 5, {"dtype": torch.float16}),
    "latents, decode": (*DECODE, 1, latents(4, 32, 16)),
    "latents, catch up": (*CATCH_UP, 2, latents(4, 32, 16, dtype=HALF)),
    "latents, verify": (*VERIFY, 9, latents(4, 32, 16)),
    "latents, no tail at all": (*NO_TAIL, 1, latents(4, 32, 16)),
    "latents, one particle": ([33], [[2]], 9, latents(1, 32, 16)),
    "latents, a tail of two spans": (*LONG_TAILS, 2, latents(4, 16, 16)),
    "latents, no key at the first": (*NO_FIRST, 2, latents(4, 32, 16, first_key=1)),
    "latents of many heads": ([40], [[1, 2]], 5, latents(20, 32, 8)),
    "latents of no power of two": ([40, 8], [[1, -1], [3, 0]], 3, latents(7, 20, 12)),
    "latents as wide as DeepSeek's": ([70], [[1, -1]], 2, latents(3, 512, 64)),
}


def case_of(name: str) -> Case:
    committed, ahead, num_columns, shape = CASES[name]
    return make_case(committed, ahead, num_columns=num_columns, **shape)


def on_device(case: Case) -> Case:
    return each_tensor(lambda part: part.to(DEVICE), case)


def arguments_of(case: Case) -> dict[str, Any]:
    """With queries as a GPU has them: rotated in place, in the rows of a wider matrix."""
    c = on_device(case)
    rows = case.query.flatten(0, 2).flatten(1)
    wide = torch.cat([rows, rows.new_full((len(rows), 64), float("nan"))], 1).to(DEVICE)
    given: dict[str, Any] = {"context": context_of(c), "max_prefix": int(case.committed.max()) + 7}
    given["query"] = wide[:, : rows.shape[1]].view(case.query.shape)
    if case.rank is not None:
        return given | {"latents": c.keys, "rank": case.rank, "scaling": SCALING}
    return given | {"keys": c.keys, "values": c.values} | c.softmax._asdict()


def launch(case: Case, **others: Any) -> torch.Tensor:
    run = plain.particle_attention if case.rank is None else latent.latent_attention
    return run(**arguments_of(case) | others)


def new_arrivals() -> torch.Tensor:
    return torch.zeros(work.MOST_WALKING, dtype=torch.int32, device=DEVICE)


def run_kernel(case: Case) -> torch.Tensor:
    output = launch(case)
    assert output.is_contiguous()
    return output


def run_whole(case: Case) -> torch.Tensor:
    with one_multiprocessor():
        return run_kernel(case)


def run_torch(case: Case) -> torch.Tensor:
    c = on_device(case)
    if c.rank is not None:
        whole = shared_prefix_attention(c.query, c.keys, None, plan_of(c), Softmax(SCALING))
        return whole[..., : c.rank]
    return shared_prefix_attention(c.query, c.keys, c.values, plan_of(c), c.softmax)


def run_anywhere(case: Case) -> torch.Tensor:
    """By the formula that devices other than a CPU use."""
    with mock.patch.object(softmax, "attend", softmax.attend_anywhere):
        return run_torch(case)


@pytest.mark.parametrize("run", [run_kernel, run_whole, run_torch, run_anywhere])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, run: Any) -> None:
    if name == "bfloat16" and run in (run_kernel, run_whole) and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    case = case_of(name)
    output = run(case)
    assert output.shape == (*case.query.shape[:4], case.rank or case.query.shape[4])
    assert output.dtype == case.query.dtype
    assert output.cpu()[case.present].isfinite().all(), "a query that sees no key, too"
    case.assert_close(output)


ROTARY = {
    dim: RotaryEmbedding(dim, dim, 1024, 10_000, is_neox_style=True, dtype=torch.float32)
    for dim in (64, 96, 128, 256)
}


def rotated(positions: torch.Tensor, *heads: torch.Tensor) -> list[torch.Tensor]:
    """Heads ``[R, heads, head_dim]``, rotated by SGLang."""
    rotary = ROTARY[heads[0].shape[2]]
    pairs = (rotary.forward_native(positions, one.float(), one.float()) for one in heads)
    return [one.to(heads[0].dtype) for one, _ in pairs]


def late(case: Case, unread: bool) -> tuple[Case, dict[str, Any]]:
    """The case with its queries and new keys rotated; and the kernel's arguments, which are not.

    The new keys are not in the cache, and what is not to be read is NaN. ``unread``: also a last
    token of the prefix is new, if all particles of its request begin with it.
    """
    position = case.starts.unsqueeze(2) + torch.arange(case.query.shape[2])
    slots = case.tails[case.particle_rows.unsqueeze(2), position % case.tails.shape[1]]
    in_prefix = position < case.committed.view(-1, 1, 1)
    alone = (in_prefix[:, :, :1] | ~case.present.unsqueeze(2)).all(1, keepdim=True) & unread
    last = case.req_to_token[case.rows, case.committed - 1].view(-1, 1, 1)
    slots = torch.where(in_prefix, last.where(alone, 0), slots)
    slots = slots.where(case.present.unsqueeze(2), 0).flatten().long()
    places = position.flatten()
    query = case.query.flatten(0, 2)
    is_new = slots > 0
    key, value = (cache[slots].clone() for cache in (case.keys, case.values))
    turned, turned_key = rotated(places, query, key)
    keys = case.keys.clone()
    values = case.values.clone()
    kept = case.keys.clone()
    kept[slots[is_new]] = turned_key[is_new]
    keys[slots] = values[slots] = float("nan")
    key[~is_new] = value[~is_new] = float("nan")
    ready = case._replace(query=turned.view(case.query.shape), keys=kept)
    cos_sin = ROTARY[case.query.shape[4]].cos_sin_cache
    wide = (
        torch.cat([key.flatten(1), value.flatten(1)], 1).to(DEVICE).view(len(key), -1, key.shape[2])
    )
    places = (one.to(DEVICE) for one in (slots, places, cos_sin))
    new = plain.New.of(*wide.chunk(2, dim=1), *places)
    return ready, {"keys": keys.to(DEVICE), "values": values.to(DEVICE), "new": new}


# Others differ in what rotations have no part in.
NOT_LATE = ("latents", "block", "head by head", "beyond the text", "bfloat16", "wide heads")
LATE = [name for name in CASES if not any(part in name for part in NOT_LATE)]


@pytest.mark.parametrize("splits", [nullcontext, one_multiprocessor])
@pytest.mark.parametrize(
    ("name", "unread"),
    [
        *product(LATE, [False]),
        *((name, True) for name in LATE if "un" in name or "no tail" in name),
    ],
)
def test_attention_rotates_and_writes(name: str, unread: bool, splits: Any) -> None:
    """Red where it differs from rotating, writing and attending in turn."""
    case = case_of(name)
    ready, given = late(case, unread)
    arrivals = new_arrivals()
    with splits():
        ready.assert_close(launch(case, **given, arrivals=arrivals))
    assert not arrivals.any(), "for the next launch"
    for kind, expected in (("keys", ready.keys), ("values", ready.values)):
        found = given[kind].cpu()[1:]
        close: Any = {"atol": 2e-3, "rtol": 2e-3, "equal_nan": True}
        torch.testing.assert_close(found, expected[1:], **close)


PREFIXES = make_case([300, 1, 65], [[3, None], [-1, 0], [0, 0]], num_columns=2)
TAILS = make_case([70, 1], [[300, 10], [0, 47]], num_columns=2)


@pytest.mark.parametrize(
    ("case", "spans"),
    [
        *((PREFIXES, {"prefix_spans": spans}) for spans in (1, 31)),
        (TAILS, {"tail_spans": 8, "tail_span": 48}),
        *((case_of("latents, decode"), {"prefix_spans": spans}) for spans in (1, 9)),
    ],
)
def test_spans(case: Case, spans: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a prefix, several blocks of keys each, and more spans than there are blocks."""
    module = plain if case.rank is None else latent
    cut_work = module.cut_work
    monkeypatch.setattr(module, "cut_work", lambda *a: cut_work(*a)._replace(**spans))
    case.assert_close(run_kernel(case))


@pytest.mark.parametrize(
    ("committed", "layer"),
    [
        ([800, 40], {}),
        ([550, 1], {"first_key": 5, "q_heads": 8, "kv_heads": 1}),
        ([700, 40], {"window": 600, "softmax": SINKS}),
    ],
)
def test_programs_that_walk_join_spans_of_long_prefixes(
    committed: list[int], layer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one request alone: red where another stores more than its output, or counts it."""
    case = make_case(committed, [[3, None], [0, 7]], num_columns=5, **layer)
    cut_work = plain.cut_work
    arrivals = new_arrivals()
    walking = {"tail_spans": 0, "prefix_spans": 3}
    monkeypatch.setattr(plain, "cut_work", lambda *a: cut_work(*a)._replace(**walking))
    for _ in range(2):
        case.assert_close(launch(case, arrivals=arrivals))
        assert not arrivals.any(), "for the next launch"


@pytest.mark.skipif(DEVICE == "cuda", reason="programs are watched in Triton's interpreter")
def test_a_shared_prompt_is_loaded_from_memory_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that run at a time read the same part: all but the first find it in the cache."""
    case = make_case([72] * 8, [[0]] * 8, num_columns=3)
    case.req_to_token[case.rows, :70] = case.req_to_token[case.rows[0], :70].clone()
    chip = work.Chip(multiprocessors=4, shared=work.H100.shared)
    monkeypatch.setattr(work, "chip_of", lambda _: chip)
    builder = interpreter.interpreter_builder
    loads = []
    caches = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in (case.keys, case.values)]
    load = builder.create_masked_load

    def watched(pointers: Any, mask: Any, *more: Any) -> Any:
        wave = builder.grid_idx[0] // chip.resident_programs(2)
        used = pointers.data.ravel()[mask.data.ravel()].tolist()
        loads.extend((wave, at) for at in used if any(a <= at < b for a, b in caches))
        return load(pointers, mask, *more)

    monkeypatch.setattr(builder, "create_masked_load", watched)
    case.assert_close(run_kernel(case))
    keys = {at for _, at in loads}
    assert len(set(loads)) == len(keys) < len(loads) / 4


def cut(size: int, columns: int, *, prefix: int = 2**17, tail: int = 265, chip: work.Chip) -> Any:
    """For 8 particles, 32 heads and 8 key heads of 128 dimensions, in half precision."""
    return work.cut_work(torch.Size([size, 8, columns, 32, 128]), 8, 2, prefix, tail, chip)


def busy(waves: float) -> float:
    """The share of time for which a device's multiprocessors work."""
    return waves / math.ceil(waves)


@pytest.mark.parametrize(
    ("size", "columns", "programs"),
    [(1, 1, 8), (1, 9, 40), (2, 9, 80), (4, 9, 160), (7, 9, 280), (64, 1, 512)],
)
@pytest.mark.parametrize(
    ("chip", "resident"),
    [(work.H100, 264), (work.A100, 108), (CHIPS[86], 84), (CHIPS[100], 296), (CHIPS[120], 188)],
)
def test_prefixes_are_cut_until_the_device_is_busy(
    size: int, columns: int, programs: int, chip: work.Chip, resident: int
) -> None:
    """On a B200 the spans that can be joined are too few for one request's drafts."""
    split = cut(size, columns, chip=chip)
    assert size * 8 * split.prefix_blocks == programs, "of one span"
    least = 0.8 if work.MAX_SPANS * programs >= resident else 0.7
    is_whole = programs >= chip.multiprocessors
    assert is_whole == (split.tail_spans == 0)
    assert is_whole or busy(split.prefix_spans * programs / resident) > least
    assert split.prefix_spans < 8 or programs < 40, "no more than it takes"
    if programs > 8:  # one token of one request is too little
        split = latent.cut_work(torch.Size([size, 8, columns, 16, 576]), 512, 2**17, 265, chip)
        assert busy(split.prefix_spans * size * split.prefix_blocks / chip.multiprocessors) > 0.8
        assert split.tail_spans * split.tail_span >= 265
        assert split.prefix_spans + split.tail_spans <= work.MAX_SPANS


@pytest.mark.parametrize(
    ("size", "spans", "filled"),
    [(4, 3, 0.91), (5, 1, 0.76), (6, 1, 0.91), (7, 4, 0.85), (8, 3, 0.91), (16, 1, 0.81)],
)
def test_prefixes_are_split_where_programs_that_walk_leave_a_third_idle(
    size: int, spans: int, filled: float
) -> None:
    """Verification by Llama 8B on an H100: by one span 4 requests fill 61 % of it, and so do 8."""
    split = cut(size, 9, chip=work.H100)
    assert split.walks and split.prefix_spans == spans
    blocks = size * 8 * split.prefix_blocks
    waves = blocks / work.H100.resident_programs(2)
    assert busy(spans * waves) == pytest.approx(filled, abs=0.01)
    assert spans == 1 or (busy(waves) < 2 / 3 and blocks <= work.MOST_WALKING)
    assert cut(size, 9, prefix=work.LEAST_SPAN, chip=work.H100).prefix_spans == 1


def test_spans_are_no_more_than_there_is_work_and_can_be_joined_at_once() -> None:
    assert cut(200, 1, chip=work.H100).prefix_spans == 1
    assert cut(1, 1, prefix=300, chip=work.H100).prefix_spans <= 5
    for tail in (1, 265, 513, 5000, 100_000):
        split = cut(1, 1, tail=tail, chip=work.H100)
        assert (split.tail_spans - 1) * split.tail_span < tail <= split.tail_spans * split.tail_span
        assert split.prefix_spans + split.tail_spans <= work.MAX_SPANS


def test_limits_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, asked once; the interpreter works as an H100 would, in order."""
    sizes = {"multi_processor_count": 142, "shared_memory_per_block_optin": 101_376}
    found = SimpleNamespace(**sizes, major=9)
    asked = mock.Mock(return_value=found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    work.chip_of.cache_clear()
    second = torch.device("cuda", 1)
    assert work.chip_of(second) == work.chip_of(second) == work.Chip(142, 101_376, overlaps=True)
    asked.assert_called_once_with(second)
    work.chip_of.cache_clear()
    assert work.chip_of(torch.device("cpu")) == work.H100._replace(overlaps=False)


@pytest.mark.parametrize("run", [run_kernel, run_whole, run_torch])
def test_a_block_may_begin_in_the_prefix(run: Any) -> None:
    """Where a tail has no slot: red where that column is taken for padding."""
    case = make_case([3, 70], [[-1, -1], [-1, 2]], num_columns=5, sees_block=True)
    before = (case.committed - 1) % case.tails.shape[1]
    case.tails[case.particle_rows, before.unsqueeze(1)] = 0
    case.assert_close(run(case))


@pytest.mark.parametrize("run", [run_kernel, run_torch])
@pytest.mark.parametrize("name", ["catch up", "latents, catch up"])
def test_a_broken_query_shows_and_breaks_no_other(name: str, run: Any) -> None:
    case = case_of(name)
    broken = torch.zeros(case.query.shape[:4], dtype=torch.bool)
    broken[0, 1, 0, 3] = broken[1, 1, 1, 0] = True
    query = case.query.masked_fill(broken.unsqueeze(4), float("nan"))
    output = run(case._replace(query=query)).cpu()
    assert output[broken].isnan().all()
    expected = case.expected()[..., : output.shape[4]].to(output.dtype)
    case.assert_close(torch.where(broken.unsqueeze(4), expected, output))


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (None, "head_dim=600; the Triton kernel takes at most 256"),
        (536, r"latents of 536 \+ 64 numbers; .* at most 512 \+ 64"),
    ],
)
def test_wide_heads_are_refused(rank: int | None, message: str) -> None:
    shape = {"q_heads": 1, "kv_heads": 1, "head_dim": 600, "rank": rank}
    with pytest.raises(ValueError, match=message):
        run_kernel(make_case([3], [[0]], num_columns=1, **shape))


def test_float32_latents_are_refused_where_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> None: ...

    monkeypatch.setattr(latent, "_attend_latents", triton.JITFunction(compiled))
    with pytest.raises(ValueError, match=r"in float32; .* Pass --dtype bfloat16"):
        latent.check_sizes(torch.float32, 512, 64)
    latent.check_sizes(torch.bfloat16, 512, 64)


@pytest.mark.parametrize("name", ["verify", "latents, catch up"])
def test_arguments_may_be_views(name: str) -> None:
    case = on_device(case_of(name))
    columns = {one: getattr(case, one).t().contiguous().t() for one in ("starts", "particle_rows")}
    query = case.query.transpose(0, 3).contiguous().transpose(0, 3)
    context = context_of(case._replace(**columns))
    case_of(name).assert_close(launch(case, query=query, context=context))


@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"window": 9, "softmax": Softmax(SCALING, cap=2.0, sinks=torch.zeros(4)), "first_key": 1},
        {"sees_block": True},
        latents(4, 32, 16),
    ],
    ids=["plain", "with all there is", "in blocks", "latents"],
)
def test_a_layer_takes_two_launches(monkeypatch: pytest.MonkeyPatch, layer: dict[str, Any]) -> None:
    """Queries stand beside keys and values, too."""
    attend = mock.MagicMock()
    joined = mock.MagicMock()
    monkeypatch.setattr(plain, "_attend_spans", attend)
    monkeypatch.setattr(latent, "_attend_latents", attend)
    monkeypatch.setattr(latent, "check_sizes", lambda *_: None)
    monkeypatch.setattr(spans, "_join_spans", joined)
    case = make_case([40, 5], [[3, -1], [0, 2]], num_columns=2, **layer)
    arguments = arguments_of(case)
    run = plain.particle_attention if case.rank is None else latent.latent_attention
    with Account() as account:
        run(**arguments)
    assert account.calls == []
    for kernel in (attend, joined):
        kernel.__getitem__.assert_called_once()
        assert all(isinstance(extent, int) for extent in kernel.__getitem__.call_args.args[0])
        kernel.__getitem__.return_value.assert_called_once()
    given, *_ = attend.__getitem__.return_value.call_args.args
    assert given.tensor.data_ptr() == arguments["query"].data_ptr()


def layer_over(
    case: Case, implementation: Any, **needs: Any
) -> tuple[ParticleAttention, Callable[..., torch.Tensor]]:
    """The backend of a model with a case's keys in its pool, and a pass through a layer of it."""
    c = on_device(case)
    heads, width = case.query.shape[3:]
    keys = c.keys.clone()

    def write(layer: Any, slots: torch.Tensor, new: torch.Tensor, _: torch.Tensor) -> None:
        keys[slots] = new

    pool = {"get_key_buffer": lambda _: keys, "get_kv_buffer": lambda _: (keys, c.values)}
    backend = backend_of(c, implementation, pool | {"set_kv_buffer": write}, **needs)

    def run(key: Any = None, slots: Any = None, **kind: Any) -> torch.Tensor:
        layer = RadixAttention(heads, width, SCALING, c.keys.shape[1], 0, **kind)
        layer.v_head_dim = c.rank or width
        value = None if key is None else key[..., : c.rank]
        query = c.query.flatten(0, 2)
        batch = SimpleNamespace(out_cache_loc=slots)
        query = query if c.rank else query.flatten(1)
        saves = {"save_kv_cache": key is not None}
        output = backend.forward_extend(query, key, value, layer, batch, **saves)  # type: ignore[arg-type]
        return output.view(*c.query.shape[:4], c.rank or width)

    return backend, run


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_layers_of_one_pass_see_what_each_asks_for(implementation: Any) -> None:
    """Red where layers that see unlike things share a plan, or the first key gets lost."""
    case = make_case([1, 70], [[0, 4], [-1, None]], num_columns=5, first_key=1)
    _, run = layer_over(case, implementation, first_key=1, blocks=True)
    blocks = case._replace(sees_block=True), {"attn_type": AttentionType.ENCODER_ONLY}
    causal = (case, {})
    windowed = (case._replace(window=20), {"sliding_window_size": 20})
    for expected, kind in (blocks, causal, windowed, blocks):
        expected.assert_close(run(**kind))
    case = case_of("latents, no key at the first")
    case.assert_close(layer_over(case, implementation, first_key=1)[1]())


def of_class(kind: Any, rotary: Any) -> Any:
    """A layer of SGLang's that has a rotary embedding alone."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.rotary_emb = rotary
    return layer


def test_a_layer_leaves_its_rotation_to_attention_over_particles() -> None:
    """In passes of its own, which attend; red where another pass gets queries not rotated."""
    case = case_of("float16")
    ready, given = late(case, unread=False)
    keys = given["keys"]
    values = given["values"]
    new = given["new"]
    pool = {"get_key_buffer": lambda _: keys, "get_kv_buffer": lambda _: (keys, values)}
    own, other = (backend_of(on_device(case), "triton", pool) for _ in range(2))
    layers = [of_class(LlamaAttention, ROTARY[64]) for _ in range(2)]
    leave_rotations(layers[0], own)
    query = arguments_of(case)["query"].flatten(0, 2).flatten(1)
    key = new.key.flatten(1)
    for attention, nth, is_own in ((own, 1, True), (other, 0, True), (own, 0, False)):
        own.rotates_pass = is_own
        with forward_context(ForwardContext(attn_backend=attention)):
            turned, _ = layers[nth].rotary_emb(new.positions, query, key)
        close: Any = {"atol": 4e-3, "rtol": 4e-3}
        torch.testing.assert_close(turned.view(ready.query.shape).cpu(), ready.query, **close)
    own.rotates_pass = True
    heads, width = case.query.shape[3:]
    radix = RadixAttention(heads, width, SCALING, case.keys.shape[1], 0)
    batch: Any = SimpleNamespace(out_cache_loc=new.slots)
    with forward_context(ForwardContext(attn_backend=own)), Account() as account:
        query, _ = layers[0].rotary_emb(new.positions, query, key)
        output = own.forward_extend(query, new.key, new.value, radix, batch)
    assert {*account.calls} <= {"set_", "copy_"}, "those of Triton's interpreter"
    ready.assert_close(output.view(case.query.shape))
    assert own.rotation is None


def of_rotary(dim: int = 64, is_neox_style: bool = True) -> Any:
    return RotaryEmbedding(64, dim, 99, 10_000, is_neox_style, HALF)


@pytest.mark.parametrize(
    ("kind", "rotary", "implementation", "dtype", "is_left"),
    [
        (LlamaAttention, of_rotary(), "triton", HALF, True),
        (LlamaAttention, of_rotary(), "torch", HALF, False),
        (LlamaAttention, of_rotary(), "triton", torch.float32, False),
        (LlamaAttention, of_rotary(32), "triton", HALF, False),
        (LlamaAttention, of_rotary(is_neox_style=False), "triton", HALF, False),
        (LlamaAttention, MRotaryEmbedding(64, 64, 99, 10_000, True, HALF), "triton", HALF, False),
        (Ministral3Attention, of_rotary(), "triton", HALF, False),
    ],
)
def test_which_rotations_are_left(
    kind: Any, rotary: Any, implementation: Any, dtype: torch.dtype, is_left: bool
) -> None:
    layer = of_class(kind, rotary)
    case = make_case([3], [[0]], num_columns=1, dtype=dtype)
    pool = {"get_key_buffer": lambda _: case.keys}
    leave_rotations(layer, backend_of(on_device(case), implementation, pool))
    assert isinstance(layer.rotary_emb, LateRotary) == is_left


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_new_latents(implementation: Any) -> None:
    """They are written first, and values come flat, as SGLang's layers take them."""
    case = case_of("latents, no tail at all")
    backend, run = layer_over(case, implementation)
    c = on_device(case)
    slots = c.req_to_token[c.rows, c.committed - 1].long()  # what the queries see last
    kept = backend.token_to_kv_pool.get_key_buffer(0)
    new = kept[slots].clone()
    kept[slots] = float("nan")
    case.assert_close(run(new, slots))


def test_blocks_are_refused_where_none_are_expected() -> None:
    _, run = layer_over(make_case([70], [[0]], num_columns=5), "torch")
    with pytest.raises(ValueError, match="cross or bidirectional attention"):
        run(attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(ValueError, match="block heads with latent attention"):
        layer_over(case_of("latents, decode"), "torch", blocks=True)


def test_layers_of_latents_are_told_to_absorb(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all modes: by the name that the backend gives itself, whatever the server's is."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", {})
    backend, _ = layer_over(case_of("latents, decode"), "torch")
    for name in (backend.prefill_attention_backend_str, backend.decode_attention_backend_str):
        handler: Any = AttentionBackendRegistry.get_handler(name)
        assert handler(None, None) == AttnForwardMethod.MLA
