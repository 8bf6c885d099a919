"""Run the benchmark that links to this file as its `__main__.py`: `python bench/NAME`.

Its servers load the plugin of `baselines/`, for SGLang's own speculative decoding on a CPU.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).absolute().parent
sys.path[0] = str(FOLDER.parent)  # instead of the benchmark's own folder

if __name__ == "__main__":
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{FOLDER.parent}/baselines", given)))
    try:
        main = import_module(f"{FOLDER.name}.run").main
        as_script = import_module("study").as_script
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed; bench/README.md and CONTRIBUTING.md say more.")
    as_script(main)
