"""The models that random LoRA adapters make of a checkpoint."""

from pathlib import Path

from audit.adapters import MODULES, PREFIX
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


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
