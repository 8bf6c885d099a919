"""What every test needs: quiet thread pools, bench/ within reach, no GPU tests without a GPU."""

import os
import sys
from pathlib import Path

import pytest

# Before torch starts its pool. SGLang runs several processes; on few cores their pools fight each
# other, and a tiny model becomes a hundred times slower. Child processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The benchmarks are scripts that import each other by name. Last, so that they hide nothing.
sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
