"""How much a server compiles before it takes requests: its variants of kernels, and their time."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from programs import printed

SCRIPT = Path(__file__).with_name("compile_starts.py")


class Most(NamedTuple):
    """The most that a start may compile."""

    variants: int
    seconds: float  # of CPU, on a slow machine


MOST = {"default": Most(70, 60.0), "adaptive-n4-k16": Most(110, 90.0)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MOST)
def test_a_start_compiles_what_rounds_run(name: str, tmp_path: Path) -> None:
    """Red where the check compiles kernels of its own, or rounds compile one again for a number."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    told = printed(sys.executable, SCRIPT, name, env=environment, timeout=None)
    print(told)
    _, variants, seconds, _ = told.splitlines()[-1].split()
    found = Most(int(variants), float(seconds))
    assert all(one <= most for one, most in zip(found, MOST[name], strict=True)), found
