"""What loading the plugin costs a process that is about to parse server arguments.

A script, since the answer is only true in a process of its own, where it is printed as JSON:
`python tests/contract/load_cost.py`.
"""

import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import sglang.launch_server  # noqa: F401  what `python -m sglang.launch_server` imports
from sglang.srt.platforms import current_platform  # noqa: F401  resolved, with our `activate`
from sglang.srt.plugins.hook_registry import HookRegistry

IMPORTS_TORCH = re.compile(r"^(import|from) torch\b", re.MULTILINE)


def imports_torch(module: ModuleType) -> bool:
    """Whether a module does so as it is loaded; `sys.modules` cannot tell, SGLang has done it."""
    assert module.__spec__ is not None
    path = module.__spec__.origin  # None: a folder without __init__.py
    return path is not None and bool(IMPORTS_TORCH.search(Path(path).read_text()))


def main() -> None:
    before, start = set(sys.modules), time.process_time()
    from sglang_smc import plugin

    plugin.register()
    HookRegistry.apply_hooks()
    seconds = time.process_time() - start
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "sglang_smc")
    others = sorted(sys.modules.keys() - before - set(ours))
    with_torch = [name for name in ours if imports_torch(sys.modules[name])]
    print(
        json.dumps(
            {"cpu_seconds": seconds, "ours": ours, "others": others, "with_torch": with_torch},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
