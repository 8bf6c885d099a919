"""What the interpreter runs must compile, too; its Python knows no types and no barriers."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py"), "90"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = {line.partition(".")[0] for line in done.stdout.splitlines()}
    assert compiled == {path.stem for path in (ROOT / "kernels").glob("*.py")}
