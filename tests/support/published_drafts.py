"""Heads as `speculators` saves them, written from heads with SGLang's keys.

In the layout of speculators 0.9.0: `test_speculators.py` compares it with what its classes save.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CLASSES = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
KINDS = {"LlamaForCausalLMEagle3": "eagle3", "DFlashDraftModel": "dflash"}
#: Keys that are not of the head's layers.
_OUTER = {
    *("architectures", "draft_vocab_size", "eagle_config", "dflash_config", "block_size", "dtype"),
    *("markov_rank", "markov_head_type", "num_target_layers", "rope_theta", "sample_from_anchor"),
}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a head's configuration and weights."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def as_speculators(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a head's configuration as `speculators` has it; ``more`` takes precedence."""
    kind = KINDS.get(config["architectures"][0], "dspark")
    layer = {name: value for name, value in config.items() if name not in _OUTER}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}
    found: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "auto_map": {"": "config.SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer | {"tie_word_embeddings": True},
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": config.get("dtype", "float32"),
    }
    if kind == "eagle3":
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        found["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
        return found | more
    block = config["dflash_config"]
    found["aux_hidden_state_layer_ids"] = [layer + 1 for layer in block["target_layer_ids"]]
    found |= {"mask_token_id": block["mask_token_id"], "block_size": config["block_size"]}
    found["sample_from_anchor"] = config.get("sample_from_anchor", kind == "dspark")
    if kind == "dspark":
        own = ("markov_rank", "markov_head_type")
        found |= {name: config[name] for name in own} | {"enable_confidence_head": False}
    return found | more


def rewrite(head: str | Path, folder: Path, **more: Any) -> str:
    """Write a shipped head's folder as `speculators` would; return the folder.

    An EAGLE-3 head has a copy of the target's embedding.
    """
    config, weights = read(Path(head))
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in weights.items()}
    if config["architectures"] == ["LlamaForCausalLMEagle3"]:
        _, of_target = read(Path(head).parent / "target")
        renamed["embed_tokens.weight"] = of_target["model.embed_tokens.weight"]
    return write(folder, as_speculators(config, **more), renamed)
