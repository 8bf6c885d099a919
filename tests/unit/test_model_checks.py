"""A model that particles cannot run on is told as the worker is built, not by its first request."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_smc.kv.ledger import Ledger
from sglang_smc.models import supported
from sglang_smc.models.supported import check_layers
from sglang_smc.ops.interface import TORCH
from sglang_smc.proposers.base import LanguageModel
from sglang_smc.round.costs import rehearse
from sglang_smc.round.play import Steps


def runner(*, latent: bool = False, **layer: Any) -> Any:
    """A model runner whose second layer is as told; one of latent attention attends in two ways."""
    plain: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    absorbed = {**plain, "head_dim": 12, "v_head_dim": 8, "num_kv_heads": 1}
    made = {**plain, "head_dim": 6, "v_head_dim": 5, "num_kv_heads": 4}
    ways = [absorbed | layer, made] if latent else [plain | {"layer_id": 0}, plain | layer]
    layers = [RadixAttention(**{"layer_id": 1, **way}, scaling=1.0) for way in ways]
    config = SimpleNamespace(
        kv_lora_rank=8,
        get_num_attention_heads=lambda _: 4,
        get_num_kv_heads=lambda _: 4 if latent else 2,
    )
    model = torch.nn.Sequential(*layers)
    return SimpleNamespace(model=model, model_config=config, use_mla_backend=latent)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))


WINDOW, ENCODER = {"sliding_window_size": 31}, {"attn_type": AttentionType.ENCODER_ONLY}
CROSS = "cross or bidirectional attention"


@pytest.mark.parametrize(
    ("layer", "refused"),
    [
        ({}, None),
        (WINDOW, None),
        ({"logit_cap": 50.0}, None),
        ({"use_irope": True}, "chunked attention"),
        ({"logit_cap": 50.0, "logit_capping_method": "clip"}, "a cap other than by tanh"),
        ({"v_head_dim": 4}, "different key and value widths"),
        ({"num_kv_heads": 4}, "layers of unlike head groups"),
        (ENCODER, CROSS),
        # Where blocks are run, with causal layers among them, which may have a window.
        ({"blocks": True, **ENCODER}, None),
        ({"blocks": True, **WINDOW}, None),
        ({"blocks": True, **ENCODER, **WINDOW}, "a window where blocks see themselves"),
        ({"blocks": True, "attn_type": AttentionType.DECODER_BIDIRECTIONAL}, CROSS),
        ({"blocks": True, **ENCODER, "is_cross_attention": True}, CROSS),
        ({"latent": True}, None),
        ({"latent": True, **WINDOW}, "a window or a cap over latents"),
    ],
)
def test_attention_that_is_not_supported_is_refused(
    layer: dict[str, Any], refused: str | None
) -> None:
    model = runner(**{name: value for name, value in layer.items() if name != "blocks"})
    told = f"does not support {refused}.*.layer 1"
    with pytest.raises(ValueError, match=told) if refused else nullcontext():
        check_layers(model, blocks="blocks" in layer)


@pytest.mark.parametrize(
    ("kind", "capability", "refused"),
    [
        (torch.float8_e4m3fn, (8, 0), True),
        (torch.float8_e4m3fn, (8, 9), False),
        (torch.float8_e5m2, (8, 0), False),
        (torch.float8_e4m3fn, None, False),
    ],
)
def test_keys_that_a_kernel_cannot_convert_are_refused(
    kind: torch.dtype, capability: tuple[int, int] | None, refused: bool
) -> None:
    with pytest.raises(ValueError, match="fp8_e5m2") if refused else nullcontext():
        supported.check_kernel_type(kind, capability)


def model(fails: Callable[..., Any] | None = None) -> Any:
    """Stands for a `ParticleForward`, whose layers may fail."""
    run = fails or (lambda chains: torch.zeros(*chains.starts.shape, 8))
    passes = {"next_logits": run, "chain_logits": lambda chains: run(chains).unsqueeze(2)}
    return SimpleNamespace(**passes, attn_backend=None)


def rehearsed(target: Any, draft: Any) -> None:
    table = torch.zeros(2, 16, dtype=torch.int32)
    ledger = Ledger(table, table, num_particles=1, max_tail=4, num_slots=8)
    rehearse(Steps(target, LanguageModel(draft, cast("Any", None)), ledger, TORCH))


WANTS = AttributeError("'NoneType' object has no attribute 'mrope'")


@pytest.mark.parametrize(
    ("module", "error", "told"),
    [
        ("sglang.srt.models", WANTS, "cannot run over particles: AttributeError: .*'mrope'"),
        (
            "sglang_smc.kernels.attention.latent",
            RuntimeError("out of resource: shared memory"),
            "pass --speculative-smc-kernels torch",
        ),
        ("sglang.srt.models", torch.OutOfMemoryError("80 GiB"), "smaller --mem-fraction-static"),
        ("sglang.srt.models", ValueError("no such layer"), "Choose another model"),
    ],
)
def test_the_model_whose_pass_fails_is_named_and_what_that_calls_for(
    module: str, error: Exception, told: str
) -> None:
    rehearsed(model(), model())
    scope: dict[str, Any] = {"__name__": module, "error": error}
    exec("def run(*_):\n    raise error", scope)
    failing = model(scope["run"])
    for flag, pair in {
        "--model-path": (failing, model()),
        "--speculative-draft-model-path": (model(), failing),
    }.items():
        with pytest.raises(ValueError, match=f"^{flag} .*{told}"):
            rehearsed(*pair)
