"""Triton kernels and their torch references, against softmax attention one query at a time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from compile_sizes import CHIPS
from particle_cases import SCALING, Case, backend_of, make_case, plan_of
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch_calls import Calls, Launch

from sglang_smc.kernels.attention import latent, spans, work
from sglang_smc.kernels.attention import particle_attention as plain
from sglang_smc.kv.transfer import each_tensor
from sglang_smc.models import softmax, supported
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.models.latent_attention import latent_attention
from sglang_smc.models.softmax import Softmax, shared_prefix_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def latents(heads: int, rank: int, rope: int, **more: Any) -> dict[str, Any]:
    """The shape of latent attention; compiled kernels of it take no float32."""
    dtype = torch.float32 if DEVICE == "cpu" else HALF
    width = {"q_heads": heads, "kv_heads": 1, "head_dim": rank + rope}
    return {**width, "rank": rank, "dtype": dtype, **more}


# Lengths of prefixes, tails, columns, and the shape of the layer.
CASES: dict[str, tuple[list[int], list[list[int | None]], int, dict[str, Any]]] = {
    "decode": ([70, 3, 200], [[0, 4], [7, 2], [0, 0]], 1, {}),
    "catch up": ([70, 3], [[-1, 4, -1], [-1, 9, None]], 2, {}),
    "verify": ([1, 129], [[-1, 5], [None, 30]], 9, {}),
    "no tail at all": ([64, 10], [[-1, -1], [-1, None]], 1, {}),
    "of unlike columns": ([40, 3], [[2, 0], [-1, 5]], 5, {"open_columns": [2, 4]}),
    "one particle": ([33], [[2]], 9, {}),
    "a tail of two spans": ([5], [[300, 10, 513]], 2, {}),
    "head by head": ([20], [[1, 2]], 2, {"q_heads": 3, "kv_heads": 3}),
    "eight to one": ([90], [[1, -1]], 9, {"q_heads": 8, "kv_heads": 1, "head_dim": 128}),
    "seven to one": ([90, 8], [[1], [2]], 5, {"q_heads": 14, "kv_heads": 2, "head_dim": 96}),
    "a window": ([70, 3, 200], [[-1, 40], [7, None], [0, 2]], 5, {"window": 30}),
    "a window within a tail": ([70, 3], [[20, 4], [7, 2]], 9, {"window": 4}),
    "a window beyond the text": ([70, 3], [[20, 4], [7, 2]], 2, {"window": 500}),
    "a cap": ([70, 3], [[-1, 4], [7, None]], 5, {"softmax": Softmax(SCALING, cap=1.5)}),
    "no key at the first": ([1, 70, 1], [[0, 4], [-1, 2], [None, -1]], 2, {"first_key": 1}),
    "no key at the first, in a window": (
        [1, 70, 3],
        [[0, 4], [-1, 2], [30, None]],
        5,
        {"first_key": 1, "window": 20},
    ),
    "no key in a prefix": ([3, 1, 70], [[4, 0], [-1, 9], [0, 0]], 5, {"first_key": 5}),
    "blocks": ([70, 3, 1], [[-1, 4], [7, None], [0, 30]], 9, {"sees_block": True}),
    "blocks of one": ([70, 3], [[-1, 4], [7, None]], 1, {"sees_block": True}),
    "blocks of unlike columns": (
        [40, 3],
        [[2, 0], [-1, 5]],
        5,
        {"open_columns": [2, 4], "sees_block": True},
    ),
    "blocks over two spans": ([5], [[505, 10, 300]], 9, {"sees_block": True}),
    "blocks without a first key": (
        [1, 70, 1],
        [[0, 4], [-1, 2], [None, -1]],
        9,
        {"sees_block": True, "first_key": 1, "q_heads": 8, "kv_heads": 2},
    ),
    "blocks with a cap": (
        [1, 70],
        [[0, 4], [-1, None]],
        5,
        {
            "sees_block": True,
            "first_key": 1,
            "q_heads": 6,
            "kv_heads": 1,
            "softmax": Softmax(SCALING, cap=1.5, sinks=torch.linspace(-1, 3, 6)),
        },
    ),
    "sinks": (
        [70, 3],
        [[-1, 4], [7, None]],
        5,
        {"softmax": Softmax(SCALING, sinks=torch.linspace(-1, 3, 4)), "window": 30},
    ),
    "scaled values": ([70], [[-1, 4]], 2, {"softmax": Softmax(SCALING, value_scale=0.5)}),
    "wide heads": (
        [70, 3],
        [[-1, 4], [7, None]],
        5,
        {"head_dim": 256, "window": 20, "softmax": Softmax(0.05, cap=50.0)},
    ),
    "bfloat16": ([70, 3], [[-1, 4], [7, None]], 5, {"dtype": torch.bfloat16}),
    "float16": ([70, 3], [[-1, 4], [7, None]], 5, {"dtype": torch.float16}),
    "latents, decode": ([70, 3, 200], [[0, 4], [7, 2], [0, 0]], 1, latents(4, 32, 16)),
    "latents, catch up": ([70, 3], [[-1, 4, -1], [-1, 9, None]], 2, latents(4, 32, 16, dtype=HALF)),
    "latents, verify": ([1, 129], [[-1, 5], [None, 30]], 9, latents(4, 32, 16)),
    "latents, no tail at all": ([64, 10], [[-1, -1], [-1, None]], 1, latents(4, 32, 16)),
    "latents, one particle": ([33], [[2]], 9, latents(1, 32, 16)),
    "latents, a tail of two spans": ([5], [[300, 10, 513]], 2, latents(4, 16, 16)),
    "latents, no key at the first": (
        [1, 70, 3],
        [[0, 4], [-1, 2], [None, -1]],
        2,
        latents(4, 32, 16, first_key=1),
    ),
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
    arguments: dict[str, Any] = on_device(case)._asdict() | {
        "max_prefix": int(case.committed.max()) + 7
    }
    rows = case.query.flatten(0, 2).flatten(1)
    wide = torch.cat([rows, rows.new_full((len(rows), 64), float("nan"))], 1).to(DEVICE)
    arguments["query"] = wide[:, : rows.shape[1]].view(case.query.shape)
    softmax = arguments.pop("softmax")._asdict()
    left_out = {"present", "open_columns"}
    if case.rank is None:
        left_out, arguments = left_out | {"rank"}, arguments | softmax
    else:
        left_out |= {"keys", "values", "window", "sees_block"}
        arguments |= {"latents": arguments["keys"], "scaling": SCALING}
    return {name: value for name, value in arguments.items() if name not in left_out}


def kernel_of(case: Case) -> Any:
    """The module of the kernel."""
    return plain if case.rank is None else latent


def launch(case: Case, **others: Any) -> torch.Tensor:
    run = plain.particle_attention if case.rank is None else latent.latent_attention
    return run(**arguments_of(case) | others)


def run_kernel(case: Case) -> torch.Tensor:
    output = launch(case)
    assert output.is_contiguous()
    return output


def run_torch(case: Case) -> torch.Tensor:
    c = on_device(case)
    if c.rank is not None:
        return latent_attention(c.query, c.keys, plan_of(c), c.rank, SCALING)
    return shared_prefix_attention(c.query, c.keys, c.values, plan_of(c), c.softmax)


def run_anywhere(case: Case) -> torch.Tensor:
    """By the formula that devices other than a CPU use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "attend", softmax.attend_anywhere)
        return run_torch(case)


@pytest.mark.parametrize("run", [run_kernel, run_torch, run_anywhere])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, run: Any) -> None:
    if name == "bfloat16" and run is run_kernel and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    case = case_of(name)
    output = run(case)
    assert output.shape == (*case.query.shape[:4], case.rank or case.query.shape[4])
    assert output.dtype == case.query.dtype
    case.assert_close(output)


PREFIXES = make_case([300, 1, 65], [[3, None], [-1, 0], [0, 0]], num_columns=2)
TAILS = make_case([70, 1], [[300, 10], [0, 47]], num_columns=2)


@pytest.mark.parametrize(
    ("case", "spans"),
    [
        *((PREFIXES, {"prefix_spans": spans}) for spans in (1, 12, 31)),
        (TAILS, {"tail_spans": 8, "tail_span": 48}),
        *((case_of("latents, decode"), {"prefix_spans": spans}) for spans in (1, 9)),
    ],
)
def test_spans(case: Case, spans: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a prefix, several blocks of keys each, and more spans than there are blocks.

    Of a tail some length, the last of them cut short or not there at all.
    """
    cut_work = kernel_of(case).cut_work
    monkeypatch.setattr(kernel_of(case), "cut_work", lambda *a: cut_work(*a)._replace(**spans))
    case.assert_close(run_kernel(case))


def cut(
    size: int,
    columns: int,
    q_heads: int,
    *,
    max_prefix: int = 2**17,
    max_tail: int = 265,
    chip: work.Chip = work.H100,
) -> work.WorkSplit:
    """For 8 particles, 8 key heads of 128 dimensions, in half precision."""
    shape = torch.Size([size, 8, columns, q_heads, 128])
    return work.cut_work(shape, 8, 2, max_prefix, max_tail, chip)


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
    """Multiprocessors stand idle for a fifth of the time at the most, with what one request has.

    On a B200 the spans that can be joined are too few for one request's drafts: a little more.
    """
    split = cut(size, columns, 32, chip=chip)
    assert size * 8 * split.prefix_blocks == programs, "of one span"
    waves = split.prefix_spans * programs / resident
    all_spans_fill = work.MAX_SPANS * programs >= resident
    assert waves / -(-waves // 1) > (0.8 if all_spans_fill else 0.7)
    assert split.prefix_spans < 8 or programs < 40, "no more than it takes"


@pytest.mark.parametrize(("size", "columns"), [(1, 9), (4, 9), (7, 9), (64, 1)])
@pytest.mark.parametrize("chip", [work.H100, CHIPS[120]])
def test_work_on_latents_is_cut_until_the_device_is_busy(
    size: int, columns: int, chip: work.Chip
) -> None:
    """For 8 particles of 16 heads: a program has a multiprocessor to itself."""
    split = latent.cut_work(torch.Size([size, 8, columns, 16, 576]), 512, 2**17, 265, chip)
    waves = split.prefix_spans * size * split.prefix_blocks / chip.multiprocessors
    assert waves / -(-waves // 1) > 0.8
    assert split.tail_spans * split.tail_span >= 265
    assert split.prefix_spans + split.tail_spans <= work.MAX_SPANS


def test_limits_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own, asked once; the interpreter works as an H100 would."""
    found = SimpleNamespace(multi_processor_count=142, shared_memory_per_block_optin=101_376)
    asked: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: (asked.append(device), found)[1]
    )
    work.chip_of.cache_clear()
    second = torch.device("cuda", 1)
    assert work.chip_of(second) == work.chip_of(second) == work.Chip(142, 101_376)
    assert asked == [second]
    work.chip_of.cache_clear()
    assert work.chip_of(torch.device("cpu")) == work.H100


def test_many_prefixes_are_not_cut_and_a_short_one_has_no_more_spans_than_blocks() -> None:
    assert cut(200, 1, 32).prefix_spans == 1
    assert cut(1, 1, 32, max_prefix=300).prefix_spans <= 5


@pytest.mark.parametrize("max_tail", [1, 265, 513, 5000, 100_000])
def test_spans_can_be_joined_at_once(max_tail: int) -> None:
    split = cut(1, 1, 32, max_tail=max_tail)
    assert split.tail_spans * split.tail_span >= max_tail
    assert (split.tail_spans - 1) * split.tail_span < max_tail
    assert split.prefix_spans + split.tail_spans <= work.MAX_SPANS


@pytest.mark.parametrize("run", [run_kernel, run_torch])
def test_a_query_before_the_first_key_breaks_no_other(run: Any) -> None:
    """It sees nothing; those behind it see their tails alone, and are as good as ever."""
    case = make_case([1, 1], [[-1, -1], [-1, 0]], num_columns=3, first_key=1)
    output = run(case)
    assert output.isfinite().all()
    case.assert_close(output)


@pytest.mark.parametrize("run", [run_kernel, run_torch])
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


def test_float32_latents_are_refused_where_they_would_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    case_of(name).assert_close(launch(case, query=query, **columns))


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
def test_a_layer_takes_two_launches_and_copies_nothing(
    monkeypatch: pytest.MonkeyPatch, layer: dict[str, Any]
) -> None:
    """Queries stand beside keys and values, too."""
    attend, joined = Launch(), Launch()
    monkeypatch.setattr(plain, "_attend_spans", attend)
    monkeypatch.setattr(latent, "_attend_latents", attend)
    monkeypatch.setattr(latent, "check_sizes", lambda *_: None)
    monkeypatch.setattr(spans, "_join_spans", joined)
    case = make_case([40, 5], [[3, -1], [0, 2]], num_columns=2, **layer)
    arguments = arguments_of(case)
    run = plain.particle_attention if case.rank is None else latent.latent_attention
    with Calls() as calls:
        run(**arguments)
    assert (attend.count, joined.count, calls.names) == (1, 1, [])
    assert attend.arguments[0].tensor.data_ptr() == arguments["query"].data_ptr()


def backend(case: Case, implementation: Any, **needs: Any) -> ParticleAttention:
    """Of a model whose layers all have the keys of a case."""
    c = on_device(case)
    pool = {"get_key_buffer": lambda _: c.keys, "get_kv_buffer": lambda _: (c.keys, c.values)}
    return backend_of(c, implementation, pool, **needs)


def layer_of(case: Case, **kind: Any) -> RadixAttention:
    q_heads, head_dim = case.query.shape[3:]
    return RadixAttention(q_heads, head_dim, SCALING, case.keys.shape[1], 0, **kind)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_layers_of_one_pass_see_what_each_asks_for(implementation: Any) -> None:
    """Red where layers that see unlike things share a plan, or the first key gets lost."""
    case = make_case([1, 70], [[0, 4], [-1, None]], num_columns=5, first_key=1)
    attention = backend(case, implementation, first_key=1, blocks=True)
    query = case.query.flatten(0, 2).flatten(1).to(DEVICE)
    blocks = case._replace(sees_block=True), {"attn_type": AttentionType.ENCODER_ONLY}
    causal, windowed = (case, {}), (case._replace(window=20), {"sliding_window_size": 20})
    batch: Any = None  # nothing is written
    for expected, kind in (blocks, causal, windowed, blocks):
        layer = layer_of(case, **kind)
        output = attention.forward_extend(query, None, None, layer, batch, save_kv_cache=False)
        expected.assert_close(output.view(case.query.shape))


def test_blocks_are_refused_where_none_are_expected() -> None:
    case = make_case([70], [[0]], num_columns=5)
    layer = layer_of(case, attn_type=AttentionType.ENCODER_ONLY)
    batch: Any = None
    with pytest.raises(ValueError, match="cross or bidirectional attention"):
        backend(case, "torch").forward_extend(case.query, None, None, layer, batch)


def backend_of_latents(
    name: str, implementation: Any, **needs: Any
) -> tuple[Case, ParticleAttention, Any]:
    """A case, the backend of a model whose latents these are, and a layer of it."""
    case = case_of(name)
    c, (heads, width) = on_device(case), case.query.shape[3:]
    assert c.rank is not None
    buffer = c.keys.clone()

    def write(layer: Any, slots: torch.Tensor, latents: torch.Tensor, _: torch.Tensor) -> None:
        buffer[slots] = latents

    pool = {"get_key_buffer": lambda _: buffer, "set_kv_buffer": write}
    layer = RadixAttention(heads, width, SCALING, 1, 0, v_head_dim=c.rank)
    return case, backend_of(c, implementation, pool, **needs), layer


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_new_latents(implementation: Any) -> None:
    """They are written first, and values come flat, as SGLang's layers take them."""
    case, attention, layer = backend_of_latents("latents, no tail at all", implementation)
    c, rank = on_device(case), layer.v_head_dim
    slots = c.req_to_token[c.rows, c.committed - 1].long()  # what the queries see last
    latents = attention.token_to_kv_pool.get_key_buffer(0)
    new = latents[slots].clone()
    latents[slots] = float("nan")
    batch: Any = SimpleNamespace(out_cache_loc=slots)
    query = c.query.flatten(0, 2)  # [G * N * C, heads, width]
    output = attention.forward_extend(query, new, new[..., :rank], layer, batch)
    case.assert_close(output.view(*case.query.shape[:4], rank))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_heads_with_latents_skip_the_first_key(implementation: Any) -> None:
    case, attention, layer = backend_of_latents(
        "latents, no key at the first", implementation, first_key=1
    )
    batch: Any = None
    query = on_device(case).query.flatten(0, 2)
    output = attention.forward_extend(query, None, None, layer, batch, save_kv_cache=False)
    case.assert_close(output.view(*case.query.shape[:4], layer.v_head_dim))


def test_block_heads_with_latents_are_refused() -> None:
    with pytest.raises(ValueError, match="block heads with latent attention"):
        backend_of_latents("latents, decode", "torch", blocks=True)


def test_layers_of_latents_are_told_to_absorb(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all modes: by the name that the backend gives itself, whatever the server's is."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", {})
    _, attention, _ = backend_of_latents("latents, decode", "torch")
    for name in (attention.prefill_attention_backend_str, attention.decode_attention_backend_str):
        handler: Any = AttentionBackendRegistry.get_handler(name)
        assert handler(None, None) == AttnForwardMethod.MLA
