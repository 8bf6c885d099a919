"""Small random pairs of the shapes of published ones: a head has its configuration's own keys.

Sizes are small; dtype, context, positions, windows, norms, names of keys and of classes are those
of the published configuration. A target is one of `model_families`, with its context and rope.
"""

import json
from pathlib import Path
from typing import Any

import torch
import zoo
from model_families import make_family
from safetensors.torch import save_file
from support.families import VOCAB

from sglang_smc.drafts import reading
from sglang_smc.drafts.heads import dflash, eagle3
from sglang_smc.drafts.heads.base import is_reduced
from sglang_smc.drafts.reading import expected

STD = 0.15
HOT = 40  # tokens of a reduced vocabulary
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "target_hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "mask_token_id": VOCAB - 2,
    "sliding_window": 9,
    "markov_rank": 8,
    "gru_hidden_dim": 8,
    "emb_dim": 8,
    "selector_rank": 8,
    "selector_top_k": 12,
    "selector_vocab_size": VOCAB - 2,
    "mrope_section": [1, 1, 0],  # of 16 dimensions a quarter is rotated, in pairs
}
LAYERS = (
    *(dflash.BLOCK_LAYERS, eagle3.EAGLE3_LAYERS),
    "aux_hidden_state_layer_ids",
)
#: Of targets' configurations: what decides where a token stands.
POSITIONS = ("max_position_embeddings", "rope_theta", "rope_scaling")


def make_target(family: str, name: str, folder: Path) -> str:
    """Write a random target of a family with the positions of a published one, in bfloat16."""
    told = zoo.config_of(name)
    changes: dict[str, Any] = {}
    if "text_config" not in told:
        changes = {key: told[key] for key in POSITIONS if told.get(key) is not None}
    if family in ("llama", "qwen3", "qwen3_moe", "deepseek_v3"):
        changes["num_hidden_layers"] = 8  # of which an EAGLE-3 head that names none reads three
    if "rope_theta" in changes:
        rope = {"rope_type": "default"} | changes.pop("rope_scaling", {})
        rope["rope_type"] = rope.pop("type", rope["rope_type"])
        changes["rope_parameters"] = rope | {"rope_theta": changes.pop("rope_theta")}
    path = make_family(folder, family, seed=3, **changes)
    _edit(Path(path), dtype="bfloat16")
    return path


def make_model_draft(family: str, name: str, folder: Path) -> str:
    """Write a random draft model of a family, in the dtype and with the context of another."""
    told = zoo.config_of(name)
    context = told["max_position_embeddings"]
    path = make_family(folder, family, seed=4, max_position_embeddings=context)
    _edit(Path(path), dtype=told.get("dtype") or told["torch_dtype"])
    return path


def make_head(name: str, folder: Path) -> str:
    """Write a random head with the keys of a published one, for targets of `SIZES`."""
    told = _shrunk(zoo.config_of(name))
    draw = torch.Generator().manual_seed(5)
    config = reading.normalized(told)
    wanted = expected(config)
    assert wanted is not None, "a class whose tensors are listed"
    weights = {part: torch.randn(shape, generator=draw) * STD for part, shape in wanted.items()}
    weights |= {part: 1 + one for part, one in weights.items() if one.ndim == 1}
    if is_reduced(config):
        weights["d2t"] = torch.arange(HOT) // 2  # what is added: every third token is left out
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(told))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _shrunk(told: dict[str, Any]) -> dict[str, Any]:
    found = {key: _shrunk(of) if isinstance(of, dict) else of for key, of in told.items()}
    found |= {key: SIZES[key] for key in SIZES.keys() & found.keys() if found[key] is not None}
    if found.get("draft_vocab_size"):
        whole = told["draft_vocab_size"] == told.get("vocab_size")
        found["draft_vocab_size"] = VOCAB if whole else HOT
    for key in LAYERS:
        if key in found:
            first = key == "aux_hidden_state_layer_ids" or reading.SPECULATORS in told
            found[key] = [first + place for place in range(min(3, len(found[key])))]
    if "num_hidden_layers" in found:
        types = found.get("layer_types") or []
        found["num_hidden_layers"] = min(2, found["num_hidden_layers"])
        if types:
            found["layer_types"] = [types[0], types[-1]][: found["num_hidden_layers"]]
    return found


def _edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
