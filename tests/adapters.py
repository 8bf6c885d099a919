"""Random LoRA adapters in peft's form, and the models that they make of a checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def make_adapter(folder: Path, target: str, *, rank: int, seed: int, scale: float = 0.3) -> str:
    """An adapter of all projections of attention and MLP."""
    folder.mkdir()
    draw, weights = torch.Generator().manual_seed(seed), {}
    for name, module in AutoModelForCausalLM.from_pretrained(target).named_modules():
        if name.endswith(MODULES):
            outer, inner = module.weight.shape
            for side, shape in (("A", (rank, inner)), ("B", (outer, rank))):
                weights[f"{PREFIX}{name}.lora_{side}.weight"] = scale * torch.randn(
                    shape, generator=draw
                )
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": MODULES}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return str(folder)


def merge(folder: Path, target: str, adapter: str) -> str:
    """A checkpoint whose weights are the target's with the adapter's product added."""
    model = AutoModelForCausalLM.from_pretrained(target)
    weights = load_file(Path(adapter, "adapter_model.safetensors"))
    for name, module in model.named_modules():
        if name.endswith(MODULES):
            down, up = (weights[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
            module.weight.data += 2 * up @ down  # alpha / rank
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return str(folder)
