"""Where there is no GPU, kernels run in Triton's interpreter, on CPU tensors.

Triton asks for TRITON_INTERPRET when a function is decorated, those of its own library included,
which may have been imported long before these tests. So they are decorated anew here: Triton's
library in place, and the kernels, which keep what they got. Nothing else in this process and no
child process is to interpret, so the setting does not stay.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.experimental.gluon  # loaded on demand else, and would refuse the library redone here
from triton import knobs

from sglang_smc.smc.ops import Ops

_FOLDER = Path(__file__).parents[2] / "kernels"
KERNELS = sorted(
    ".".join(path.relative_to(_FOLDER).with_suffix("").parts) for path in _FOLDER.rglob("*.py")
)


def decorate_anew() -> None:
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        importlib.reload(triton.language.standard)
        importlib.reload(triton.language)
        for name in KERNELS:
            sys.modules.pop(f"sglang_smc.kernels.{name}", None)
        for name in KERNELS:
            importlib.import_module(f"sglang_smc.kernels.{name}")


if not torch.cuda.is_available() and not knobs.runtime.interpret:
    decorate_anew()


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels' tensors live: a GPU unless this process interprets."""
    return "cuda" if torch.cuda.is_available() and not knobs.runtime.interpret else "cpu"


@pytest.fixture(scope="session")
def kernels() -> Ops:
    """The operations of a round with the kernels as they are decorated here."""
    import sglang_smc.ops.triton_ops

    return importlib.reload(sglang_smc.ops.triton_ops).TRITON


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The interpreter computes in numpy, which warns of log 0 where a GPU gives -inf."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Whoever reads a result that no program wrote finds NaN there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter says it of every loop between loaded bounds."""
    quiet = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(quiet)
