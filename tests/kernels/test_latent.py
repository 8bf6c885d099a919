"""The Triton kernel and its torch reference, against softmax attention one query at a time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from compile_sizes import CHIPS
from particle_cases import SCALING, Case, backend_of, make_case, plan_of
from sglang.srt.layers.radix_attention import RadixAttention
from torch_calls import Calls, Launch

from sglang_smc.kernels.attention import join, work
from sglang_smc.kernels.attention import latent as kernel
from sglang_smc.models import supported
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.models.latent_attention import latent_attention
from sglang_smc.state.transfer import each_tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

# Lengths of prefixes, tails, columns, query heads, and the widths of values and rotary parts.
CASES: dict[str, tuple[list[int], list[list[int | None]], int, int, tuple[int, int]]] = {
    "decode": ([70, 3, 200], [[0, 4], [7, 2], [0, 0]], 1, 4, (32, 16)),
    "catch up": ([70, 3], [[-1, 4, -1], [-1, 9, None]], 2, 4, (32, 16)),
    "verify": ([1, 129], [[-1, 5], [None, 30]], 9, 4, (32, 16)),
    "no tail at all": ([64, 10], [[-1, -1], [-1, None]], 1, 4, (32, 16)),
    "one particle": ([33], [[2]], 9, 1, (32, 16)),
    "a tail of two spans": ([5], [[300, 10, 513]], 2, 4, (16, 16)),
    "many heads": ([40], [[1, 2]], 5, 20, (32, 8)),
    "no power of two": ([40, 8], [[1, -1], [3, 0]], 3, 7, (20, 12)),
    "as wide as DeepSeek's": ([70], [[1, -1]], 2, 3, (512, 64)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Case, int]:
    """A case whose keys are latents, and the width of their values."""
    committed, ahead, num_columns, heads, (rank, rope) = CASES[name]
    shape: dict[str, Any] = {"q_heads": heads, "kv_heads": 1, "head_dim": rank + rope}
    case = make_case(committed, ahead, num_columns=num_columns, dtype=dtype, **shape)
    return case._replace(values=case.keys), rank


def on_device(case: Case) -> Case:
    return each_tensor(lambda part: part.to(DEVICE), case)


def arguments_of(case: Case, rank: int) -> dict[str, Any]:
    arguments = on_device(case)._asdict()
    for name in ("values", "present", "open_columns"):
        del arguments[name]
    for name in ("softmax", "window", "sees_block", "first_key"):  # of other layers
        del arguments[name]
    arguments |= {"max_prefix": int(case.committed.max()) + 7, "scaling": SCALING, "rank": rank}
    return {"latents": arguments.pop("keys"), **arguments}


def run_kernel(case: Case, rank: int) -> torch.Tensor:
    return kernel.latent_attention(**arguments_of(case, rank))


def run_torch(case: Case, rank: int) -> torch.Tensor:
    c = on_device(case)
    return latent_attention(c.query, c.keys, plan_of(c), rank, SCALING)


def assert_close(case: Case, output: torch.Tensor) -> None:
    """The values are the first part of the keys; the rest of the expected is nobody's."""
    rank = output.shape[4]
    whole = case.expected().to(output.dtype)
    whole[..., :rank] = output.cpu()
    case.assert_close(whole)


@pytest.fixture(params=["torch", "triton"])
def run(request: pytest.FixtureRequest) -> Any:
    return {"torch": run_torch, "triton": run_kernel}[request.param]


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, run: Any) -> None:
    case, rank = make(name, HALF if DEVICE != "cpu" else torch.float32)
    output = run(case, rank)
    assert output.shape == (*case.query.shape[:4], rank)
    assert output.is_contiguous()
    assert_close(case, output)


def test_in_half_precision(run: Any) -> None:
    case, rank = make("catch up", HALF)
    output = run(case, rank)
    assert output.dtype == HALF
    assert_close(case, output)


@pytest.mark.parametrize("spans", [1, 9])
def test_spans_of_a_prefix(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, several blocks of keys each, and more spans than there are blocks."""
    cut_work = kernel.cut_work
    monkeypatch.setattr(kernel, "cut_work", lambda *a: cut_work(*a)._replace(prefix_spans=spans))
    case, rank = make("decode", HALF)
    assert_close(case, run_kernel(case, rank))


def test_a_broken_query_shows(run: Any) -> None:
    """And breaks no other."""
    case, rank = make("catch up", HALF)
    broken = torch.zeros(case.query.shape[:4], dtype=torch.bool)
    broken[0, 1, 0, 3] = broken[1, 1, 1, 0] = True
    query = case.query.masked_fill(broken.unsqueeze(4), float("nan"))
    output = run(case._replace(query=query), rank).cpu()
    assert output[broken].isnan().all()
    expected = case.expected()[..., :rank].to(output.dtype)
    assert_close(case, torch.where(broken.unsqueeze(4), expected, output))


def test_queries_may_be_views(run: Any) -> None:
    case, rank = make("catch up", HALF)
    turned = case.query.transpose(0, 3).contiguous().transpose(0, 3)
    assert_close(case, run(case._replace(query=turned), rank))


def test_latents_that_fit_no_block_are_refused() -> None:
    case = make_case([3], [[0]], num_columns=1, q_heads=1, kv_heads=1, head_dim=600)
    with pytest.raises(ValueError, match=r"latents of 536 \+ 64 numbers; .* at most 512 \+ 64"):
        run_kernel(case, 536)


def test_float32_is_refused_where_it_would_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> None: ...

    monkeypatch.setattr(kernel, "_attend_latents", triton.JITFunction(compiled))
    with pytest.raises(ValueError, match=r"in float32; .* Pass --dtype bfloat16"):
        kernel.check_sizes(torch.float32, 512, 64)
    kernel.check_sizes(torch.bfloat16, 512, 64)


@pytest.mark.parametrize(("size", "columns"), [(1, 9), (4, 9), (7, 9), (64, 1)])
@pytest.mark.parametrize("chip", [work.H100, CHIPS[120]])
def test_work_is_cut_until_the_device_is_busy(size: int, columns: int, chip: work.Chip) -> None:
    """For 8 particles of 16 heads: a program has a multiprocessor to itself."""
    split = kernel.cut_work(torch.Size([size, 8, columns, 16, 576]), 512, 2**17, 265, chip)
    waves = split.prefix_spans * size * split.prefix_blocks / chip.multiprocessors
    assert waves / -(-waves // 1) > 0.8
    assert split.tail_spans * split.tail_span >= 265
    assert split.prefix_spans + split.tail_spans <= work.MAX_SPANS


def test_a_layer_takes_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And copies nothing."""
    launch = Launch()
    monkeypatch.setattr(kernel, "_attend_latents", launch)
    monkeypatch.setattr(join, "_join_spans", launch)
    monkeypatch.setattr(kernel, "check_sizes", lambda *_: None)
    case, rank = make("verify")
    arguments = arguments_of(case, rank)
    with Calls() as calls:
        kernel.latent_attention(**arguments)
    assert (launch.count, calls.names) == (2, [])


def backend(
    case: Case, rank: int, implementation: Any, **needs: Any
) -> tuple[ParticleAttention, Any]:
    """The backend of a model whose latents these are, and a layer of it."""
    c, (heads, width) = on_device(case), case.query.shape[3:]
    buffer = c.keys.clone()

    def write(layer: Any, slots: torch.Tensor, latents: torch.Tensor, _: torch.Tensor) -> None:
        buffer[slots] = latents

    pool = {"get_key_buffer": lambda _: buffer, "set_kv_buffer": write}
    layer = RadixAttention(heads, width, SCALING, 1, 0, v_head_dim=rank)
    return backend_of(c, implementation, pool, rank=rank, **needs), layer


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_as_a_backend(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """New latents are written first, and values come flat, as SGLang's layers take them."""
    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    case, rank = make("no tail at all", HALF)
    attention, layer = backend(case, rank, implementation)
    c = on_device(case)
    slots = c.req_to_token[c.rows, c.committed - 1].long()  # what the queries see last
    latents = attention.token_to_kv_pool.get_key_buffer(0)
    new = latents[slots].clone()
    latents[slots] = float("nan")
    batch: Any = SimpleNamespace(out_cache_loc=slots)
    query = c.query.flatten(0, 2)  # [G * N * C, heads, width]
    output = attention.forward_extend(query, new, new[..., :rank], layer, batch)
    assert output.shape == (len(query), case.query.shape[3] * rank)
    assert_close(case, output.view(*case.query.shape[:4], rank))


@pytest.mark.parametrize("heads_need", [{"first_key": 1}, {"blocks": True}])
def test_heads_are_refused(heads_need: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run as models with all keys, or without blocks."""
    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    with pytest.raises(ValueError, match="heads with latent attention"):
        backend(*make("decode", HALF), "torch", **heads_need)


def test_layers_are_told_to_absorb(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all modes: by the name that the backend gives itself, whatever the server's is."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", {})
    attention, _ = backend(*make("decode", HALF), "torch")
    for name in (attention.prefill_attention_backend_str, attention.decode_attention_backend_str):
        handler: Any = AttentionBackendRegistry.get_handler(name)
        assert handler(None, None) == AttnForwardMethod.MLA
