"""What a new process does that has imported SGLang's launcher, and no plugin yet.

A script, since the answers are only true in a process of its own: `python cold_start.py MODEL`. It
prints, each as a line of JSON, what `sglang serve` says of a setting out of range and what mode
`ServerArgs` has behind `sglang_smc.load_plugins`, in copies of the process, and what loading the
plugin imports.
"""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import sglang.launch_server  # noqa: F401  what `python -m sglang.launch_server` imports
from sglang.srt import server_args
from sglang.srt.platforms import current_platform  # noqa: F401  resolved, with our `activate`
from sglang.srt.plugins.hook_registry import HookRegistry

IMPORTS_TORCH = re.compile(r"^(import|from) torch\b", re.MULTILINE)


def imports_torch(module: ModuleType) -> bool:
    """Whether a module does so as it is loaded; `sys.modules` cannot tell, SGLang has done it."""
    assert module.__spec__ is not None
    path = module.__spec__.origin  # None: a folder without __init__.py
    return path is not None and bool(IMPORTS_TORCH.search(Path(path).read_text()))


def refused(model: str) -> str:
    from sglang.cli.main import main

    smc = ["--speculative-algorithm", "SMC", "--speculative-draft-model-path", model]
    sys.argv = ["sglang", "serve", model, "--model-type", "llm", *smc]
    sys.argv += ["--speculative-smc-num-particles", "0"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main()
    except (Exception, SystemExit) as error:
        return f"{said.getvalue()}{error}"
    return "it started"


def taken(model: str) -> str:
    import sglang_smc.load_plugins  # noqa: F401  as trainers do

    models = dict.fromkeys(("model_path", "speculative_draft_model_path"), model)
    given: Any = {"speculative_algorithm": "SMC", "speculative_smc_mode": "exact", **models}
    return getattr(server_args.ServerArgs(**given), "speculative_smc_mode")  # noqa: B009  SMC's


def imported() -> dict[str, list[str]]:
    before = set(sys.modules)
    from sglang_smc import plugin

    plugin.register()
    HookRegistry.apply_hooks()
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "sglang_smc")
    return {
        "ours": ours,
        "others": sorted(sys.modules.keys() - before - set(ours)),
        "with_torch": [name for name in ours if imports_torch(sys.modules[name])],
    }


if __name__ == "__main__":
    for said in (refused, taken):
        if process := os.fork():
            os.waitpid(process, 0)
        else:
            print(json.dumps(said(sys.argv[1])), flush=True)
            os._exit(0)
    print(json.dumps(imported()))
