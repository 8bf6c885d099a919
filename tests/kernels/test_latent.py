"""The Triton kernel and its torch reference, against softmax attention one query at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from particle_cases import SCALING, Case, make_case

from sglang_smc.kernels.attention import latent as kernel
from sglang_smc.models.latent_attention import latent_attention
from sglang_smc.models.shared_prefix import plan_shared_prefix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16

# What the interpreter says of every loop between loaded bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

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


@pytest.fixture(autouse=True)
def unwritten_is_nan() -> Iterator[None]:
    """Whoever reads a result that no program wrote finds NaN there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Case, int]:
    """A case whose keys are latents, and the width of their values."""
    committed, ahead, num_columns, heads, (rank, rope) = CASES[name]
    shape = {"q_heads": heads, "kv_heads": 1, "head_dim": rank + rope, "dtype": dtype}
    case = make_case(committed, ahead, num_columns=num_columns, **shape)
    return case._replace(values=case.keys), rank


def on_device(case: Case) -> Case:
    return Case(*(part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in case))


def run_kernel(case: Case, rank: int) -> torch.Tensor:
    c = on_device(case)
    return kernel.latent_attention(
        c.query,
        c.keys,
        rank=rank,
        req_to_token=c.req_to_token,
        tails=c.tails,
        rows=c.rows,
        committed=c.committed,
        particle_rows=c.particle_rows,
        starts=c.starts,
        max_prefix=int(case.committed.max()) + 7,
        max_tail=c.max_tail,
        scaling=SCALING,
    )


def run_torch(case: Case, rank: int) -> torch.Tensor:
    c = on_device(case)
    plan = plan_shared_prefix(
        c.req_to_token,
        c.tails,
        c.rows,
        c.committed,
        c.particle_rows,
        c.starts,
        num_columns=c.query.shape[2],
        group=c.query.shape[3],
        dtype=c.query.dtype,
        cache=c.keys,
    )
    return latent_attention(c.query, c.keys, plan, rank, SCALING)


def assert_close(case: Case, output: torch.Tensor) -> None:
    """The values are the first part of the keys; the rest of the expected is nobody's."""
    rank = output.shape[4]
    whole = case.expected().to(output.dtype)
    whole[..., :rank] = output.cpu()
    case.assert_close(whole)


@pytest.fixture(params=["torch", "triton"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
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


@pytest.mark.parametrize("spans", [1, 3, 9])
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
def test_work_is_cut_until_the_device_is_busy(size: int, columns: int) -> None:
    """For 8 particles of 16 heads: a program has a multiprocessor to itself."""
    work = kernel.cut_work(torch.Size([size, 8, columns, 16, 576]), 512, 2**17, 265)
    waves = work.prefix_spans * size * work.prefix_blocks / 132
    assert waves / -(-waves // 1) > 0.8
    assert work.tail_spans * work.tail_span >= 265
    assert work.prefix_spans + work.tail_spans <= kernel.MAX_SPANS
