"""Run `python bench/gpu`, see run.py; `bash bench/gpu/run.sh` unpacks its payload first."""

import sys
from pathlib import Path

# Replace this folder, which Python puts first.
sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

try:
    from gpu.run import main
    from study import as_script
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed, and not in .sg/ either; CONTRIBUTING.md says more.")

if __name__ == "__main__":
    as_script(main)
