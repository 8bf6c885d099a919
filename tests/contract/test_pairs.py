"""A draft made for other texts, or in another dtype, than its target starts as it is published."""

import json
import logging
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from resolved_args import resolve
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import LlamaConfig, Phi3Config

from sglang_smc.dtype import AUTO_DTYPE_ENV
from sglang_smc.models.draft_config import extend_positions, trained_length
from sglang_smc.upstream import model_config_of, resolved

PAIR = Path(__file__).parents[2] / "bench" / "pair"
DTYPES = ("float16", "float32", "bfloat16", None)
#: What SGLang loads a model in under `--dtype auto`.
LOADED = {"bfloat16": torch.bfloat16} | dict.fromkeys(("float16", "float32", None), torch.float16)


def copied(name: str, folder: Path, **settings: Any) -> str:
    """A model of the pair with other settings, without its weights; None leaves one out."""
    told = json.loads((PAIR / name / "config.json").read_text()) | settings
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in told.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return str(folder)


def given(smc: dict[str, Any], target: str, draft: str, **more: Any) -> dict[str, Any]:
    """Arguments for configurations alone: weights are made up, not looked for."""
    models = {"model_path": target, "speculative_draft_model_path": draft}
    return smc | models | {"speculative_draft_load_format": "dummy"} | more


def of_draft(server_args: Any, length: int | None = None) -> ModelConfig:
    """The draft's configuration as its worker builds it."""
    path = resolved(server_args).speculative_draft_model_path
    return ModelConfig.from_server_args(
        server_args, model_path=path, is_draft_model=True, context_length=length
    )


@pytest.mark.parametrize(("name", "target", "draft"), product(("eagle3", "draft"), DTYPES, DTYPES))
def test_a_draft_is_loaded_in_the_dtype_of_its_target(
    monkeypatch: pytest.MonkeyPatch,
    smc: dict[str, Any],
    tmp_path: Path,
    name: str,
    target: str | None,
    draft: str | None,
) -> None:
    """Red where SGLang's `auto` takes each from its own configuration, or on a CPU alone."""
    monkeypatch.setenv(AUTO_DTYPE_ENV, "1")
    paths = (
        copied("target", tmp_path / "t", dtype=target),
        copied(name, tmp_path / "d", dtype=draft),
    )
    found = resolve(**given(smc, *paths))
    assert of_draft(found).dtype == model_config_of(found).dtype == LOADED[target]
    assert ModelConfig.from_server_args(found).dtype == LOADED[target]


def test_a_dtype_that_is_given_stays(smc: dict[str, Any], tmp_path: Path) -> None:
    draft = copied("eagle3", tmp_path / "d", dtype="float16")
    found = resolve(**given(smc, str(PAIR / "target"), draft, dtype="float32"))
    assert of_draft(found).dtype == ModelConfig.from_server_args(found).dtype == torch.float32


@pytest.mark.parametrize("name", ["eagle3", "dflash", "draft"])
def test_a_draft_for_shorter_texts_starts_with_one_warning(
    caplog: pytest.LogCaptureFixture, smc: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Red where SGLang's check refuses it, or its table stays short."""
    draft = copied(name, tmp_path / "d", max_position_embeddings=256)
    asked = given(smc, str(PAIR / "target"), draft, max_running_requests=4, speculative_num_steps=3)
    with caplog.at_level(logging.WARNING):
        found = resolve(**asked)
        assert of_draft(found, 2048).hf_config.max_position_embeddings == 2048
    (warning,) = (one.getMessage() for one in caplog.records if draft in one.getMessage())
    assert "--speculative-draft-model-path" in warning
    assert "up to 256 tokens, and this server's have up to 2048" in warning
    assert "attends to the last 256 alone (--speculative-draft-window-size; 0: to all" in warning
    assert resolved(found).speculative_draft_window_size == 256
    caplog.clear()
    whole = resolve(**asked | {"context_length": 256})
    assert resolved(whole).speculative_draft_window_size is None
    assert not [one for one in caplog.records if draft in one.getMessage()]


@pytest.mark.parametrize(
    ("size", "window", "told"),
    [
        (0, None, "fewer of its draft tokens are kept"),
        (2048, 2048, "fewer of its draft tokens are kept, .* --speculative-draft-window-size 256"),
        (64, 64, "attends to the last 64 alone"),
    ],
)
def test_a_window_that_is_given_holds(
    caplog: pytest.LogCaptureFixture,
    smc: dict[str, Any],
    tmp_path: Path,
    size: int,
    window: int | None,
    told: str,
) -> None:
    """Red where the default replaces it, and where SGLang says that it has no effect."""
    draft = copied("eagle3", tmp_path / "d", max_position_embeddings=256)
    asked = given(smc, str(PAIR / "target"), draft, speculative_draft_window_size=size)
    with caplog.at_level(logging.WARNING):
        found = resolve(**asked)
    assert resolved(found).speculative_draft_window_size == window
    (warning,) = (one.getMessage() for one in caplog.records if draft in one.getMessage())
    assert re.search(told, warning)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize(
    ("name", "given_sizes", "told"),
    [
        ("dflash", (3, None), "size is 3 with blocks of 4 tokens; allowed: at least as many"),
        ("draft", (0, 4), "sink-size is 4 with --speculative-draft-window-size 0; allowed"),
        ("draft", (-1, None), "must be positive"),
        ("draft", (16, -1), "must be non-negative"),
        (None, (16, None), "size is 16 without a model that drafts"),
    ],
)
def test_a_window_that_cannot_be_is_refused(
    smc: dict[str, Any], name: str | None, given_sizes: tuple[int, int | None], told: str
) -> None:
    size, sink = given_sizes
    asked = given(smc, str(PAIR / "target"), str(PAIR / (name or "draft")))
    asked |= {"speculative_draft_window_size": size, "speculative_draft_sink_size": sink}
    asked["speculative_num_steps"] = 3
    if name is None:
        asked |= {"speculative_draft_model_path": None, "speculative_smc_ngram_matches": True}
        asked["speculative_smc_mode"] = "exact"
    with pytest.raises(ValueError, match=told):
        resolve(**asked)


@pytest.mark.parametrize(
    "told",
    [
        {"architectures": ["OPTForCausalLM"], "model_type": "opt", "max_position_embeddings": 128},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 128},
    ],
)
def test_a_draft_with_a_short_table_of_positions_is_refused(
    smc: dict[str, Any], tmp_path: Path, told: dict[str, Any]
) -> None:
    """Rows behind its end do not exist."""
    (tmp_path / "config.json").write_text(json.dumps(told))
    asked = smc | {"speculative_draft_model_path": str(tmp_path)}
    said = rf"-path .* is a {told['architectures'][0]}, .* of 128 positions, .* 256 tokens; allowed"
    with pytest.raises(ValueError, match=said + r": .* Pass --context-length 128, or choose"):
        resolve(**asked)
    resolve(**asked | {"context_length": 128})


LONGER = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
OVERRIDES = {"max_position_embeddings": 8192, "rope_parameters": LONGER | {"rope_theta": 1e4}}


def test_overrides_of_the_configuration_are_the_targets(smc: dict[str, Any]) -> None:
    """Red where YaRN for a longer target scales the rotations of its head."""
    target = str(PAIR / "target")
    told = {"json_model_override_args": json.dumps(OVERRIDES)}
    found = resolve(**given(smc, target, str(PAIR / "eagle3")), **told)
    assert model_config_of(found).hf_config.rope_parameters["rope_type"] == "yarn"
    head = of_draft(found, 8192).hf_config
    assert head.rope_parameters["rope_type"] == "default"
    assert head.max_position_embeddings == 8192
    # A target that drafts for itself is overridden, as its MTP layer would be.
    own = of_draft(resolve(**given(smc, target, target), **told))
    assert own.hf_config.rope_parameters["rope_type"] == "yarn"


SIZES = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}
WAVES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
#: Kinds of rotations, and how many positions they are trained on.
ROPES: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "default"}, 64),
    ({"rope_type": "linear", "factor": 2.0}, 128),
    ({"rope_type": "dynamic", "factor": 2.0}, 128),
    ({"rope_type": "llama3", "factor": 8.0, **WAVES}, 64),
    ({"rope_type": "yarn", "factor": 2.0}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 32}, 64),
]


@pytest.mark.parametrize(("rope", "trained"), ROPES, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_longer_table_goes_on_as_it_began(
    rope: dict[str, Any], trained: int, is_told: bool
) -> None:
    """Red where a factor, or the frequencies, follow from the number of positions."""
    kind = Phi3Config if rope["rope_type"] == "longrope" else LlamaConfig
    own = {"pad_token_id": 0, "original_max_position_embeddings": 32} if kind is Phi3Config else {}
    config = kind(**SIZES, **own, rope_parameters=rope | {"rope_theta": 1e4})
    if not is_told:  # as in configurations of code of their own
        config.rope_parameters.pop("original_max_position_embeddings", None)
        if rope.get("original_max_position_embeddings"):
            config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    assert is_told is False or trained_length(config) == trained
    before = table_of(config)
    extend_positions(config, 500)
    after = table_of(config, 500)
    assert torch.equal(after[: len(before)], before)
    assert len(after) >= 500
    lengths = (float(rows.square().sum()) for rows in (after[499], before[1]))
    assert next(lengths) == pytest.approx(next(lengths), rel=1e-4)
    turn = angle(before[1])  # of the fastest frequency, in a position
    assert math.cos(angle(after[499]) - 499 * turn) == pytest.approx(1.0, abs=1e-3)


def angle(row: torch.Tensor) -> float:
    """Radians of the fastest frequency at a position, from 16 cosines and as many sines."""
    return math.atan2(float(row[16]), float(row[0]))


def table_of(config: Any, length: int = 0) -> torch.Tensor:
    """Cosines and sines of a model's positions, as SGLang makes them for ``length``."""
    rope = dict(config.rope_parameters)
    if vars(config).get("original_max_position_embeddings"):  # as srt/models/llama.py does
        rope["original_max_position_embeddings"] = config.original_max_position_embeddings
    theta = rope.pop("rope_theta")
    made: Any = get_rope(32, 32, config.max_position_embeddings, theta, True, rope, torch.float32)
    if rope["rope_type"] == "longrope":
        return made.long_cos_sin_cache
    if length:
        made._ensure_cos_sin_cache_length(length - 1)
    return made.cos_sin_cache
