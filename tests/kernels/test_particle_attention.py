"""The Triton kernel and its torch reference, against softmax attention one query at a time."""

from typing import Any

import pytest
import torch
from particle_cases import SCALING, Case, make_case

from sglang_smc.kernels import particle_attention as kernel
from sglang_smc.models.shared_prefix import plan_shared_prefix, shared_prefix_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# What the interpreter says of every loop between loaded bounds.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

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
    "bfloat16": ([70, 3], [[-1, 4], [7, None]], 5, {"dtype": torch.bfloat16}),
    "float16": ([70, 3], [[-1, 4], [7, None]], 5, {"dtype": torch.float16}),
}


def on_device(case: Case) -> dict[str, Any]:
    return {
        name: part.to(DEVICE) if isinstance(part, torch.Tensor) else part
        for name, part in case._asdict().items()
    }


def run_kernel(case: Case) -> torch.Tensor:
    arguments = on_device(case)
    del arguments["present"], arguments["open_columns"]
    max_prefix = int(case.committed.max()) + 7
    return kernel.particle_attention(**arguments, max_prefix=max_prefix, scaling=SCALING)


def run_torch(case: Case) -> torch.Tensor:
    c = Case(**on_device(case))
    plan = plan_shared_prefix(
        c.req_to_token,
        c.rows,
        c.committed,
        c.particle_rows,
        c.starts,
        num_columns=c.query.shape[2],
        group=c.query.shape[3] // c.keys.shape[1],
        dtype=c.query.dtype,
        cache=c.keys,
    )
    return shared_prefix_attention(c.query, c.keys, c.values, plan, SCALING)


@pytest.mark.parametrize("run", [run_kernel, run_torch])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, run: Any) -> None:
    if name == "bfloat16" and run is run_kernel and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    committed, ahead, num_columns, shape = CASES[name]
    case = make_case(committed, ahead, num_columns=num_columns, **shape)
    output = run(case)
    assert output.dtype == case.query.dtype
    case.assert_close(output)


@pytest.mark.parametrize("spans", [1, 3, 12])
def test_spans_of_a_prefix(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, several blocks of keys each, and more spans than there are blocks."""
    cut_work = kernel.cut_work
    monkeypatch.setattr(kernel, "cut_work", lambda *a: cut_work(*a)._replace(prefix_spans=spans))
    case = make_case([300, 1, 65], [[3, None], [-1, 0], [0, 0]], num_columns=2)
    case.assert_close(run_kernel(case))


def test_few_prefixes_are_cut_and_many_are_not() -> None:
    def spans(size: int, max_prefix: int) -> int:
        return kernel.cut_work(torch.Size([size, 4, 1, 8, 64]), 2, 2, max_prefix, 100).prefix_spans

    assert spans(4, 2**17) == 64
    assert spans(4, 300) == 5, "no more than there are blocks of keys"
    assert spans(300, 2**17) == 1


def test_wide_heads_are_refused() -> None:
    case = make_case([3], [[0]], num_columns=1, head_dim=256)
    with pytest.raises(ValueError, match="head_dim=256; the Triton kernel takes at most 128"):
        run_kernel(case)


def test_arguments_may_be_views() -> None:
    case = make_case([40, 5], [[3, -1], [0, 2]], num_columns=2)
    columns = {
        name: getattr(case, name).t().contiguous().t() for name in ("starts", "particle_rows")
    }
    query = case.query.transpose(0, 3).contiguous().transpose(0, 3)
    case.assert_close(run_kernel(case._replace(query=query, **columns)))
