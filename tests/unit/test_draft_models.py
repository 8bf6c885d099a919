"""A language model's checkpoint is compared with its configuration before anything is loaded."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_families import CONFIGS, make_family
from published_drafts import read, write
from sglang.srt.utils.hf_transformers_utils import get_config
from transformers import AutoConfig

from sglang_smc.drafts import checkpoint, language_models
from sglang_smc.models import draft_config, head_kinds

PAIR = Path(__file__).parents[2] / "bench" / "pair"
DRAFT = PAIR / "draft"
UP = "model.layers.1.mlp.up_proj.weight"

Tensors = dict[str, torch.Tensor]


def opened(folder: str | Path) -> Any:
    config = draft_config.read(get_config, str(folder), False)
    return SimpleNamespace(hf_config=config, model_path=str(folder), revision=None)


def problems(folder: str | Path, target: str | Path = PAIR / "target") -> list[str]:
    given: Any = SimpleNamespace(model_path=str(target), revision=None)
    return [str(one) for one in head_kinds.draft_problems(opened(folder), given, 4)]


def saved(folder: Path, *, without: str = "", more: Tensors | None = None, **config: Any) -> Path:
    """Write the shipped draft with changes."""
    told, tensors = read(DRAFT)
    kept = {name: one for name, one in tensors.items() if name != without}
    write(folder, told | config, kept | (more or {}))
    return folder


@pytest.mark.parametrize("name", ["draft", "tuned"])
def test_a_whole_model_is_taken(name: str) -> None:
    assert problems(PAIR / name) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"without": UP}, r"lacks a tensor layers\.1\.mlp\.up_proj\.weight that LlamaForCausalLM"),
        ({"num_hidden_layers": 9}, r"lacks tensors layers\.\d\..* and \d+ more that"),
        ({"without": "model.norm.weight"}, r"lacks a tensor norm\.weight that"),
        ({"hidden_size": 256}, r"embed_tokens\.weight of \[512, 128\] instead of \[512, 256\]"),
        ({"vocab_size": 600}, r"embed_tokens\.weight of \[512, 128\] instead of \[600, 128\]"),
        ({"num_hidden_layers": 1}, r"has tensors layers\.1\..* that LlamaForCausalLM has no place"),
        (
            {"more": {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}},
            r"has a tensor layers\.0\.self_attn\.q_norm\.weight that",
        ),
    ],
)
def test_what_would_draft_noise_is_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """The first started without a word; sizes failed behind the target, and named no draft."""
    (found,) = problems(saved(tmp_path, **changes))
    assert re.search(told, found) and found.endswith("Download both anew, or choose another draft.")


@pytest.mark.parametrize("size", [4, 200, -100])
def test_a_broken_file_is_named(size: int, tmp_path: Path) -> None:
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    (found,) = problems(tmp_path)
    assert found.startswith(f"has weights that cannot be loaded: {file} cannot be read: ")


def test_a_folder_has_weights_and_all_that_its_index_names(tmp_path: Path) -> None:
    """A pair of configurations alone is planned for."""
    file = saved(tmp_path / "draft") / "model.safetensors"
    index = {"weight_map": {UP: "model-2.safetensors", "model.norm.weight": file.name}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors, which the index" in problems(tmp_path / "draft")[0]
    file.unlink()
    assert problems(tmp_path / "draft")[0].startswith("has no weights, *.safetensors or ")
    assert problems(tmp_path / "draft", tmp_path / "draft") == []


def test_files_that_are_not_loaded_are_not_read(tmp_path: Path) -> None:
    """Mistral's own file beside Hugging Face's, and one that no index names."""
    other = {"tok_embeddings.weight": torch.zeros(2)}
    write(tmp_path / "other", {}, other)
    weights = (tmp_path / "other" / "model.safetensors").read_bytes()
    file = saved(tmp_path / "draft") / "consolidated.safetensors"
    file.write_bytes(weights)
    assert problems(tmp_path / "draft") == []
    index = {"weight_map": {UP: "model.safetensors"}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    file.rename(file.with_name("value_head.safetensors"))
    assert problems(tmp_path / "draft") == []


def fused(tensors: Tensors) -> Tensors:
    part = "model.layers.0.self_attn."
    parts = [tensors.pop(f"{part}{name}_proj.weight") for name in "qkv"]
    return tensors | {f"{part}qkv_proj.weight": torch.cat(parts)}


def plus(*names: str) -> Any:
    return lambda tensors: tensors | {name: torch.ones(4) for name in names}


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): one for name, one in tensors.items()}


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({}, fused),
        ({}, bare),
        ({}, plus("model.layers.0.self_attn.rotary_emb.inv_freq")),
        ({}, plus("v_head.summary.weight", "mtp.layers.0.mlp.up_proj.weight")),
        ({"tie_word_embeddings": True}, lambda t: t),
        ({"tie_word_embeddings": True}, plus("lm_head.weight")),
        ({"num_nextn_predict_layers": 1}, plus("model.layers.4.eh_proj.weight")),
        ({"bias": True}, plus("model.layers.0.self_attn.q_proj.bias")),
        ({"quantization_config": {"bits": 4}}, plus("model.layers.0.mlp.up_proj.qweight")),
        ({"architectures": ["OwnForCausalLM"]}, lambda t: {"model.own.weight": torch.ones(2)}),
    ],
    ids=[
        "fused",
        "no prefix",
        "buffer",
        "other heads",
        "tied",
        "tied and saved",
        "next",
        "bias",
        "4 bits",
        "own",
    ],
)
def test_what_sglang_loads_is_taken(changes: dict[str, Any], change: Any, tmp_path: Path) -> None:
    """Red where a good checkpoint is refused."""
    told, tensors = read(DRAFT)
    tied = changes.get("tie_word_embeddings")
    kept = {name: one for name, one in tensors.items() if not (tied and name == "lm_head.weight")}
    write(tmp_path, told | changes, change(kept))
    assert problems(tmp_path) == []


def test_an_old_pickle_is_read(tmp_path: Path) -> None:
    """Of before torch 1.6: no archive, which cannot be mapped."""
    told, tensors = read(DRAFT)
    (tmp_path / "config.json").write_text(json.dumps(told))
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    assert problems(tmp_path) == []
    del tensors[UP]
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    assert "lacks a tensor" in problems(tmp_path)[0]


#: Whose checkpoints transformers has otherwise than its classes: their embedding alone is compared.
CONVERTED = {"qwen3_moe", "mixtral", "deepseek_v2", "gemma3", "mistral3", "qwen3_5_text"}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt2", "opt", *sorted(CONVERTED)])
def test_families_are_taken_as_transformers_saves_them(family: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, family)
    config = AutoConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0]
    shapes = checkpoint.shapes_in(tmp_path)
    assert list(language_models.problems(config, name, shapes, packed=False)) == []
    assert (language_models._parameters(config, name) is None) == (family in CONVERTED)
    layer = next(one for one in shapes if re.search(r"(layers|h)\.1\..*weight$", one))
    del shapes[layer]
    found = list(language_models.problems(config, name, shapes, packed=False))
    assert bool(found) == (family not in CONVERTED)


#: Refused as drafts, and large: `CONFIGS` leaves sizes of theirs out.
WITH_STATES = {"falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "nemotron_h"}


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - WITH_STATES))
def test_no_family_is_refused(family: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_family(tmp_path, family))
    shapes = checkpoint.shapes_in(tmp_path)
    name = (config.architectures or [""])[0]
    assert list(language_models.problems(config, name, shapes, packed=False)) == []
