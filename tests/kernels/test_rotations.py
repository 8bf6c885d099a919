"""Which passes leave rotations to attention over particles, and what layers compute then."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from compile_sizes import CHIPS
from fake_llama import decoder_layer, norm
from particle_cases import Case, backend_of, context_of, make_case, one_multiprocessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from sglang.srt.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from sglang.srt.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer

from sglang_smc.kernels.attention import work
from sglang_smc.kv.transfer import each_tensor
from sglang_smc.models.chains import Chains
from sglang_smc.models.rotary import LateRotary, leave_rotations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16

pytestmark = pytest.mark.usefixtures("unwritten_is_nan", "one_rank")


def on_device(case: Case) -> Case:
    return each_tensor(lambda part: part.to(DEVICE), case)


@pytest.mark.parametrize(
    ("num_columns", "chip", "ends_at", "is_rotated"),
    [
        (9, work.H100, None, True),
        (9, CHIPS[100], None, True),
        (9, work.A100, None, False),  # in smaller blocks, or registers would spill
        (2, work.A100, None, True),
        (2, work.H100, 0, False),  # no layer attends behind the last keys
    ],
)
def test_which_passes_leave_rotations(
    num_columns: int, chip: work.Chip, ends_at: int | None, is_rotated: bool
) -> None:
    case = make_case([3], [[0]], num_columns=num_columns, head_dim=256, dtype=HALF)
    pool = {"get_key_buffer": lambda _: case.keys}
    backend = backend_of(on_device(case), "triton", pool)
    backend.ends_at = ends_at
    tokens = torch.zeros(1, 1, num_columns, dtype=torch.int64)
    with mock.patch.object(work, "chip_of", lambda _: chip):
        backend.plan(Chains(tokens, case.starts, tokens, context_of(case).locations))
    assert backend.rotates_pass == is_rotated


KINDS: dict[str, tuple[type, type, type]] = {
    "llama": (LlamaDecoderLayer, LlamaAttention, LlamaMLP),
    "qwen2": (Qwen2DecoderLayer, Qwen2Attention, Qwen2MLP),
    "qwen3": (Qwen3DecoderLayer, Qwen3Attention, Qwen2MLP),
}


def fill(own: Any) -> None:
    """Give an attention layer without values some, and norms of heads that halve them."""
    for nth, parameter in enumerate(own.parameters()):
        generator = torch.Generator().manual_seed(nth)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    own.q_norm = own.k_norm = norm(64, dtype=HALF)
    own.q_norm.forward = lambda heads: heads / 2
    own.head_dim = 64
    own.alt_stream = None


def run_layer(own: Any, positions: torch.Tensor, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """As SGLang does; that of Qwen 3 without what it asks of a server."""
    if type(own) is Qwen3Attention:
        return own.attn(*own.forward_prepare_native(positions, hidden), batch)
    return own(positions, hidden, batch)


@pytest.mark.parametrize("splits", [nullcontext, one_multiprocessor])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_layers_of_a_target_compute_and_store_what_sglangs_kernels_do(
    name: str, splits: Any
) -> None:
    """SGLang's own attention layers in verification; by the reference they rotate and store."""
    case = make_case([70, 3], [[0, 4], [7, None]], num_columns=5, dtype=HALF)
    heads = (*case.query.shape[3:4], *case.keys.shape[1:])
    like: Any = {"hidden": 128, "wide": 128, "heads": heads, "dtype": HALF, "device": DEVICE}
    position = case.starts.unsqueeze(2) + torch.arange(5)
    slots = case.tails[case.particle_rows.unsqueeze(2), position % case.tails.shape[1]]
    slots = slots.where(case.present.unsqueeze(2), 0).flatten().long().to(DEVICE)
    hidden = torch.randn(len(slots), 128, generator=torch.Generator().manual_seed(1))
    found = {}
    for implementation in ("torch", "triton"):
        own = decoder_layer(*KINDS[name], **like).self_attn
        fill(own)
        keys, values = (cache.to(DEVICE).clone() for cache in (case.keys, case.values))
        keys[slots] = values[slots] = float("nan")

        def write(_: Any, at: torch.Tensor, *new: torch.Tensor, kept: Any = (keys, values)) -> None:
            for cache, part in zip(kept, new, strict=True):
                cache[at] = part

        pool = {
            "get_key_buffer": lambda _, kept=keys: kept,
            "get_kv_buffer": lambda _, kept=(keys, values): kept,
            "set_kv_buffer": write,
        }
        backend = backend_of(on_device(case), implementation, pool)
        leave_rotations(own, backend)
        assert isinstance(own.rotary_emb, LateRotary) == (implementation == "triton")
        batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, out_cache_loc=slots)
        with splits(), forward_context(ForwardContext(attn_backend=backend)):
            output = run_layer(own, position.flatten().to(DEVICE), hidden.to(DEVICE, HALF), batch)
        asked = output.view(*position.shape, -1)[case.present.to(DEVICE)]
        found[implementation] = asked, keys[1:], values[1:]
    close: Any = {"atol": 4e-3, "rtol": 4e-3, "equal_nan": True}
    for one, other in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(one, other, **close)
