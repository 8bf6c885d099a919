"""A model that particles cannot run on is told as the worker is built, not by its first request."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_smc.drafts.proposal import LanguageModel
from sglang_smc.memory.ledger import Ledger
from sglang_smc.models import supported
from sglang_smc.models.supported import check_layers
from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.round.costs import rehearse
from sglang_smc.round.steps import Steps


def runner(**layer: Any) -> Any:
    """A model runner whose second layer is as told."""
    plain = {"num_heads": 4, "head_dim": 8, "scaling": 1.0, "num_kv_heads": 2}
    layers = [RadixAttention(**plain, layer_id=0), RadixAttention(**plain | layer, layer_id=1)]
    config = SimpleNamespace(get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2)
    return SimpleNamespace(
        model=torch.nn.Sequential(*layers), model_config=config, use_mla_backend=False
    )


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))


@pytest.mark.parametrize("layer", [{}, {"sliding_window_size": 31}, {"logit_cap": 50.0}])
def test_attention_to_all_or_to_a_window_passes(layer: dict[str, Any]) -> None:
    check_layers(runner(**layer))


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        ({"use_irope": True}, "chunked attention"),
        ({"logit_cap": 50.0, "logit_capping_method": "clip"}, "a cap other than by tanh"),
        ({"v_head_dim": 4}, "different key and value widths"),
        ({"num_kv_heads": 4}, "layers of unlike head groups"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "cross or bidirectional attention"),
    ],
)
def test_other_attention_is_refused(layer: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"does not support {named} .layer 1"):
        check_layers(runner(**layer))


def test_blocks_pass_where_they_are_run() -> None:
    """With causal layers among them, which may have a window."""
    check_layers(runner(attn_type=AttentionType.ENCODER_ONLY), blocks=True)
    check_layers(runner(sliding_window_size=31), blocks=True)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (
            {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 31},
            "a window where blocks see themselves",
        ),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "cross or bidirectional attention"),
        (
            {"attn_type": AttentionType.ENCODER_ONLY, "is_cross_attention": True},
            "cross or bidirectional attention",
        ),
    ],
)
def test_blocks_of_other_kinds_are_refused(layer: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"does not support {named}.*.layer 1"):
        check_layers(runner(**layer), blocks=True)


def over_latents(**layer: Any) -> Any:
    """A layer of latent attention: one way to attend over latents, and one over keys of heads."""
    absorbed: dict[str, Any] = {"num_heads": 4, "head_dim": 12, "v_head_dim": 8, "num_kv_heads": 1}
    made: dict[str, Any] = {"num_heads": 4, "head_dim": 6, "v_head_dim": 5, "num_kv_heads": 4}
    layers = [RadixAttention(**ways, scaling=1.0, layer_id=1) for ways in (absorbed | layer, made)]
    config = SimpleNamespace(
        kv_lora_rank=8, get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 4
    )
    return SimpleNamespace(
        model=torch.nn.Sequential(*layers), model_config=config, use_mla_backend=True
    )


def test_latent_attention_passes() -> None:
    check_layers(over_latents())


def test_a_window_over_latents_is_refused() -> None:
    with pytest.raises(ValueError, match="does not support a window or a cap over latents"):
        check_layers(over_latents(sliding_window_size=31))


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
    expected = pytest.raises(ValueError, match="fp8_e5m2") if refused else nullcontext()
    with expected:
        supported.check_kernel_type(kind, capability)


class Model:
    """Stands for a `ParticleForward`; its layers may want what no round has."""

    def __init__(self, wants: str | None = None) -> None:
        self.wants = wants

    def next_logits(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        if self.wants:
            raise AttributeError(f"'NoneType' object has no attribute '{self.wants}'")
        return torch.zeros(*tokens.shape[:2], 8)

    def chain_logits(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.next_logits(tokens).unsqueeze(2)


def rehearsed(target: Model, draft: Model) -> None:
    table = torch.zeros(2, 16, dtype=torch.int32)
    ledger = Ledger(table, table, num_particles=1, max_tail=4, num_slots=8)
    rehearse(Steps(target, LanguageModel(draft), ledger, TORCH))  # type: ignore[arg-type]


def test_models_that_run_pass() -> None:
    rehearsed(Model(), Model())


@pytest.mark.parametrize(
    ("target", "draft", "flag"),
    [("mrope", None, "--model-path"), (None, "mrope", "--speculative-draft-model-path")],
)
def test_a_model_that_wants_more_than_rounds_have_is_named(
    target: str | None, draft: str | None, flag: str
) -> None:
    with pytest.raises(ValueError, match=f"^{flag} cannot run over particles: Attr.*'mrope'"):
        rehearsed(Model(target), Model(draft))


def fails_in(module: str, error: Exception) -> Callable[..., Any]:
    """A pass in which a function of ``module`` raises."""
    scope: dict[str, Any] = {"__name__": module, "error": error}
    exec("def run(*_):\n    raise error", scope)
    return scope["run"]


@pytest.mark.parametrize(
    ("module", "error", "cure"),
    [
        (
            "sglang_smc.kernels.attention.latent",
            RuntimeError("out of resource: shared memory"),
            "pass --speculative-smc-kernels torch",
        ),
        ("sglang.srt.models", torch.OutOfMemoryError("80 GiB"), "smaller --mem-fraction-static"),
        ("sglang.srt.models", ValueError("no such layer"), "Choose another model"),
    ],
)
def test_what_a_failing_pass_calls_for(module: str, error: Exception, cure: str) -> None:
    """Not every failure is the model's."""
    model = Model()
    model.next_logits = fails_in(module, error)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=re.escape(cure)):
        rehearsed(Model(), model)
