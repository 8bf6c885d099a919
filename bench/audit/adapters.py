"""Make random LoRA adapters, in peft's form."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def make_adapter(folder: Path, target: str, *, rank: int, seed: int, scale: float = 0.3) -> str:
    """Write an adapter of all projections of attention and MLP; return its folder."""
    folder.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    weights = dict[str, torch.Tensor]()
    for name, weight in load_file(Path(target, "model.safetensors")).items():
        module = name.removesuffix(".weight")
        outer, *inner = weight.shape
        if module.endswith(MODULES):
            for side, shape in (("A", (rank, *inner)), ("B", (outer, rank))):
                drawn = scale * torch.randn(shape, generator=draw)
                weights[f"{PREFIX}{module}.lora_{side}.weight"] = drawn
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": MODULES}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return str(folder)
