"""SGLang's reading of engine keywords on an H200 that is not there: ``python pretended_gpu.py``.

With numbers it reads them once for each, on a GPU of so many MiB; with ``sm_100``, of Blackwell's
capability. Reads a JSON list of keywords from its input, and prints a line for each: what SGLang
made of them, or why it refuses them. A script of its own: torch is told of the GPU before SGLang is
imported.
"""

import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

MEMORY = 143_771  # MiB
BLACKWELL = "sm_100"
CAPABILITY = (10, 0) if BLACKWELL in sys.argv else (9, 0)


class Kernels(MetaPathFinder, Loader):
    """Stands in for SGLang's compiled kernels, which load the driver: nobody calls them here."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == "sgl_kernel"
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = attribute  # type: ignore[method-assign]


def attribute(name: str) -> Any:
    """Something of any name, which says yes when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def pretend() -> None:
    """Make torch say that there is one."""
    sys.meta_path.insert(0, Kernels())
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY << 20,
        multi_processor_count=132,
        gcnArchName="",
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_, **__: CAPABILITY
    cuda.get_device_name = lambda *_, **__: properties.name
    cuda.get_device_properties = lambda *_, **__: properties
    cuda.mem_get_info = lambda *_, **__: (MEMORY << 20, MEMORY << 20)
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True


def hold(size: int) -> None:
    """Give the GPU so many MiB of memory."""
    global MEMORY
    MEMORY = size
    torch.cuda.get_device_properties().total_memory = size << 20


def read(arguments: dict[str, Any]) -> dict[str, Any]:
    """What SGLang makes of one engine's keywords."""
    from resolved_args import resolve

    from sglang_smc import upstream

    try:
        found = upstream.resolved(resolve(**arguments))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    graphs = found.cuda_graph_config
    assert graphs is not None
    return {
        "algorithm": found.speculative_algorithm,
        "attention": found.attention_backend,
        "prefill_graphs": str(graphs.prefill.backend),
        "sizes": graphs.decode.bs,
        "float32_logits": found.enable_fp32_lm_head,
        "running": found.max_running_requests,
        "reserved": round((1 - (found.mem_fraction_static or 0)) * MEMORY),  # MiB
    }


def main() -> None:
    pretend()
    import sglang.srt.server_args as server_args
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import common

    for module in (common, server_args):
        for name in ("get_device_memory_capacity", "get_nvgpu_memory_capacity"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: MEMORY)
    load_plugins()
    asked = json.load(sys.stdin)
    sizes = [int(one) for one in sys.argv[1:] if one != BLACKWELL]
    for size in sizes or [MEMORY]:
        hold(size)
        for arguments in asked:
            print(json.dumps(read(arguments)))


if __name__ == "__main__":
    main()
