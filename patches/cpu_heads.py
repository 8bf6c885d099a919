"""Tensor parallelism on a CPU: heads as the checkpoint has them, as on a GPU."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_smc.server.hooks import Patch

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig


def adjust_config_with_unaligned_cpu_tp(
    original: Callable, model_config: "ModelConfig", load_config: "LoadConfig", tp_size: int
) -> "ModelConfig":
    """Leave heads and widths as they are: layers replicate key heads that are too few to share."""
    return model_config


PATCHES = (
    Patch(
        target="sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        hook_type=HookType.AROUND,
        function=adjust_config_with_unaligned_cpu_tp,
        what="Leaves the numbers of heads, and widths, as the model has them.",
        why="SGLang pads them for every device called cpu, and weights to match only where its own "
        "CPU engine runs (SGLANG_USE_CPU_ENGINE=1): a model with one key head would fail under "
        "--tp-size 2 as its weights are loaded. No platform is asked.",
        relies_on=(
            "srt/model_executor/model_runner.py:1301 (calls it where the device is cpu)",
            "srt/layers/linear.py (QKVParallelLinear replicates key heads, as on a GPU)",
        ),
        retire_when="SGLang pads heads only where it pads their weights.",
    ),
)
