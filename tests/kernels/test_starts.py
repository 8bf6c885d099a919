"""How much a server compiles before it takes requests: its variants of kernels."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from programs import printed

SCRIPT = Path(__file__).with_name("compile_starts.py")


class Most(NamedTuple):
    """What a start compiles at most; its CPU seconds go by both, and differ from run to run."""

    variants: int
    code: int  # KB of machine code


MOST = {"default": Most(68, 4_650), "adaptive-n4-k16": Most(87, 6_900)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MOST)
def test_a_start_compiles_what_rounds_run(name: str, tmp_path: Path) -> None:
    """Red where the check compiles kernels of its own, or rounds compile one again for a number."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    told = printed(sys.executable, SCRIPT, name, env=environment, timeout=None)
    print(told)
    _, variants, _, code = told.splitlines()[-1].split()
    assert int(variants) <= MOST[name].variants
    assert int(code) <= MOST[name].code
